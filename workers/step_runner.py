"""One step through the model: from scheduled chunks to sampled tokens and scored prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.protocol.tokens import TokenRecord
from workers.batch import BatchBuilder, ScheduledChunk
from workers.endings import ending_by_length
from workers.model import Float32Array, ModelRunner
from workers.sampling import SampleRow, sample, score


@dataclass(frozen=True, slots=True)
class StepResult:
    """Seconds in the model, and the new tokens of each chunk that reached its end, in their order.

    A chunk with drafts brings one token more than drafts that held; a prompt that is only scored
    brings none.
    """

    model_s: float
    tokens: list[list[TokenRecord]]


class StepRunner:
    """Builds batches, runs them and samples. Changes no sequence; collects the prompt's scores."""

    def __init__(self, runner: ModelRunner, batches: BatchBuilder) -> None:
        self._runner = runner
        self._batches = batches

    def run(self, chunks: Sequence[ScheduledChunk]) -> StepResult:
        """Compute one step."""
        batch = self._batches.build(chunks)
        started_s = time.perf_counter()
        logits = self._runner.forward(batch)
        model_s = time.perf_counter() - started_s
        if not any(chunk.drafts or chunk.run.needs_scoring for chunk in chunks):
            at_end = [chunk for chunk in chunks if chunk.reaches_end]
            records = sample(logits, [_sample_row(chunk, 0) for chunk in at_end])
            return StepResult(model_s, [[record] for record in records])
        return StepResult(model_s, self._take_apart(chunks, logits))

    def _take_apart(
        self, chunks: Sequence[ScheduledChunk], logits: Float32Array
    ) -> list[list[TokenRecord]]:
        """Sample where some chunk has more logits than that of its last token."""
        wanted: list[int] = []
        rows: list[SampleRow] = []
        counts: list[int] = []
        start = 0
        for chunk in chunks:
            stop = start + chunk.num_logit_rows
            if chunk.run.needs_scoring:
                _score(chunk, logits[start:stop])
            if chunk.reaches_end:
                is_over = ending_by_length(chunk.run.sequence, self._runner.spec) is not None
                counts.append(0 if is_over else 1 + len(chunk.drafts))
                wanted += range(stop - counts[-1], stop)
                rows += [_sample_row(chunk, number) for number in range(counts[-1])]
            start = stop
        records = iter(sample(logits[np.array(wanted, dtype=np.int64)], rows))
        return [
            _verified([next(records) for _ in range(count)], chunk.drafts)
            for count, chunk in zip(
                counts, (chunk for chunk in chunks if chunk.reaches_end), strict=True
            )
        ]


def _sample_row(chunk: ScheduledChunk, number: int) -> SampleRow:
    sequence = chunk.run.sequence
    allowed = None if sequence.grammar is None else sequence.grammar.allowed
    return SampleRow(sequence.sampling, sequence.num_generated + number, chunk.run.rules, allowed)


def _verified(records: list[TokenRecord], drafts: tuple[int, ...]) -> list[TokenRecord]:
    """Tokens up to the first that differs from its draft: what follows had a wrong context."""
    for number, draft in enumerate(drafts[: len(records)]):
        if records[number].token_id != draft:
            return records[: number + 1]
    return records


def _score(chunk: ScheduledChunk, logits: Float32Array) -> None:
    """Note the log-probabilities of the prompt's tokens behind those of the chunk."""
    run, sequence = chunk.run, chunk.run.sequence
    first, num_logprobs = sequence.num_computed, sequence.sampling.num_logprobs
    if run.prompt_records is None or num_logprobs is None:
        return
    scored = sequence.tokens[first + 1 : first + 1 + len(logits)]
    # A preempted prompt is computed again from its start.
    run.prompt_records[first:] = score(logits[: len(scored)], scored, num_logprobs)
