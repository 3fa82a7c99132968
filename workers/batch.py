"""Turns scheduled chunks into the arrays of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workers.model import StepBatch
from workers.sequence_run import SequenceRun


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """`num_tokens` tokens of one sequence, from its computed watermark on, run in this step.

    The last of them may be `drafts`: guesses of the tokens that follow the known ones.
    """

    run: SequenceRun
    num_tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def num_known(self) -> int:
        """Tokens that are no guess."""
        return self.num_tokens - len(self.drafts)

    @property
    def reaches_end(self) -> bool:
        """True if this step computes the last known token, so that the next one is sampled."""
        return self.num_known == self.run.num_pending

    @property
    def num_logit_rows(self) -> int:
        """How many of the last tokens' logits are wanted."""
        if self.run.needs_scoring:
            return self.num_tokens
        return 1 + len(self.drafts) if self.reaches_end else 0


def advance(chunks: Sequence[ScheduledChunk]) -> tuple[int, int]:
    """Count the chunks' known tokens as computed; how many they are, and decode rows of them."""
    num_decode = 0
    for chunk in chunks:
        sequence = chunk.run.sequence
        is_decode = sequence.num_computed >= sequence.num_prompt_tokens
        num_decode += is_decode and chunk.num_known == 1
        sequence.num_computed += chunk.num_known
    return sum(chunk.num_known for chunk in chunks), num_decode


class BatchBuilder:
    """Builds steps in buffers of its own: a batch is good until the next `build`."""

    def __init__(self, block_tokens: int, max_tokens: int, max_sequences: int) -> None:
        self._block_tokens = block_tokens
        self._token_ids = np.zeros(max_tokens, dtype=np.int64)
        self._positions = np.zeros(max_tokens, dtype=np.int64)
        self._slot_mapping = np.zeros(max_tokens, dtype=np.int64)
        self._cu_query_lens = np.zeros(max_sequences + 1, dtype=np.int32)
        self._context_lens = np.zeros(max_sequences, dtype=np.int32)
        self._block_tables = np.zeros((max_sequences, 8), dtype=np.int32)

    def build(self, chunks: Sequence[ScheduledChunk]) -> StepBatch:
        """Arrays of one step; `logit_rows` are those that the chunks want, in order."""
        logit_rows: list[int] = []
        num_tokens = 0
        widest = max(len(chunk.run.sequence.block_ids) for chunk in chunks)
        tables = self._cleared_tables(len(chunks), widest)
        for row, chunk in enumerate(chunks):
            self._fill_table(tables[row], chunk.run)
            if chunk.num_tokens == 1:
                self._place_token(num_tokens, chunk.run)
            else:
                self._place_tokens(num_tokens, chunk)
            num_tokens += chunk.num_tokens
            self._cu_query_lens[row + 1] = num_tokens
            self._context_lens[row] = chunk.run.sequence.num_computed + chunk.num_tokens
            logit_rows += range(num_tokens - chunk.num_logit_rows, num_tokens)
        return StepBatch(
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            slot_mapping=self._slot_mapping[:num_tokens],
            cu_query_lens=self._cu_query_lens[: len(chunks) + 1],
            context_lens=self._context_lens[: len(chunks)],
            block_tables=tables,
            logit_rows=np.array(logit_rows, dtype=np.int64),
            histories=[chunk.run.sequence.tokens for chunk in chunks],
            num_prompt_tokens=[chunk.run.sequence.num_prompt_tokens for chunk in chunks],
        )

    def _cleared_tables(self, num_rows: int, num_columns: int) -> np.ndarray:
        if num_columns > self._block_tables.shape[1]:
            shape = (self._block_tables.shape[0], 2 * num_columns)
            self._block_tables = np.zeros(shape, dtype=np.int32)
        tables = self._block_tables[:num_rows, :num_columns]
        tables.fill(0)
        return tables

    def _fill_table(self, row: np.ndarray, run: SequenceRun) -> None:
        block_ids = run.sequence.block_ids
        num_blocks = len(block_ids)
        if run.num_tabled < num_blocks:
            if num_blocks > len(run.table):
                run.table = np.resize(run.table, 2 * num_blocks)
            run.table[run.num_tabled : num_blocks] = block_ids[run.num_tabled :]
            run.num_tabled = num_blocks
        row[:num_blocks] = run.table[:num_blocks]

    def _place_token(self, at: int, run: SequenceRun) -> None:
        sequence = run.sequence
        position = sequence.num_computed
        block, offset = divmod(position, self._block_tokens)
        self._token_ids[at] = sequence.tokens[position]
        self._positions[at] = position
        self._slot_mapping[at] = sequence.block_ids[block] * self._block_tokens + offset

    def _place_tokens(self, at: int, chunk: ScheduledChunk) -> None:
        sequence = chunk.run.sequence
        first, last = sequence.num_computed, sequence.num_computed + chunk.num_tokens
        span = slice(at, at + chunk.num_tokens)
        positions = self._positions[span]
        positions[:] = np.arange(first, last)
        self._token_ids[span] = [*sequence.tokens[first:last], *chunk.drafts]
        blocks = chunk.run.table[positions // self._block_tokens]
        self._slot_mapping[span] = blocks * np.int64(self._block_tokens) + (
            positions % self._block_tokens
        )
