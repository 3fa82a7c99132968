"""The model port: one packed step in, logits out. Every engine is one of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tiering.block_layout import BlockLayout
from workers.hbm_pool import HbmPool

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A GPU's memory in bytes when the weights are in it: all of it, what we hold, what nobody holds."""

    total: int
    own: int
    free: int

    def within(self, share: float) -> int:
        """Bytes we may still take, for ours to be that share of all; no more than there are."""
        return max(0, min(int(share * self.total) - self.own, self.free))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the rest of the worker must know of a model.

    `fingerprint` is a sha256 over everything that changes the KV bytes of a token sequence: weights,
    tokenizer, config, KV dtype. It enters the root of every block key. `memory`: None where the pool
    lies in the host's.
    """

    layout: BlockLayout
    vocab_size: int
    context_tokens: int
    eos_token_ids: frozenset[int]
    fingerprint: bytes
    memory: DeviceMemory | None = None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step over B sequences with T tokens in all (prefill chunks and decode tokens alike).

    token_ids, positions, slot_mapping: int64 [T]; slot = block id * block_tokens + offset.
    cu_query_lens: int32 [B + 1]; context_lens: int32 [B], tokens in context after this step.
    block_tables: int32 [B, max_blocks], rows padded with 0.
    logit_rows: int64 [R], indices into T whose logits are wanted.
    histories[b]: all tokens of sequence b (prompt, then generated); num_prompt_tokens[b] of them are
    the prompt. Only test engines read these two; they are references, not copies.
    """

    token_ids: Int64Array
    positions: Int64Array
    slot_mapping: Int64Array
    cu_query_lens: Int32Array
    context_lens: Int32Array
    block_tables: Int32Array
    logit_rows: Int64Array
    histories: Sequence[Sequence[int]]
    num_prompt_tokens: Sequence[int]


class ModelRunner(Protocol):
    """Runs steps on one device. Called from the engine thread only."""

    @property
    def spec(self) -> ModelSpec:
        """Known from construction on."""
        ...

    def make_pool(self, num_blocks: int) -> HbmPool:
        """The HBM pool, blocks of `layout.block_bytes`, all zero.

        Steps write their KV into it and read context through block tables. Called once, before
        `warm_up`.
        """
        ...

    def warm_up(self, max_tokens: int) -> None:
        """Run and allocate what the first request must not pay for.

        Steps will have at most `max_tokens` tokens; longer ones are computed nevertheless.
        """
        ...

    def forward(self, batch: StepBatch) -> Float32Array:
        """Compute the step, store its KV into the pool, return logits float32 (R, vocab_size).

        Returns when the KV is written. The logits are good until the next call: their buffer is
        used again.
        """
        ...
