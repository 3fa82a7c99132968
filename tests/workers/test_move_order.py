"""The order of steps and moves (notes on faults 1 to 4), by a mover that uses all that it is allowed.

It writes into the blocks of a load until it has answered, and reads those of a store as late as it
may; and the engine's KV is written late in its step.
"""

# ruff: noqa: S311 - random prompts, no secrets

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.workers.conftest import ROOT
from tiering.block_hash import BlockHasher
from workers.cold_blocks import ColdBlocks
from workers.hbm_pool import HbmPool
from workers.kv_jobs import Deliver, LoadJob, MoverStats, PrefetchJob, StoreJob
from workers.model import Float32Array, StepBatch
from workers.models.digest import DigestRunner
from workers.sequence import Sequence, SequencePhase

BLOCK = 16
NUM_BLOCKS = 18
HOLD_S = 0.003  # a few steps
MakeSequence = Callable[..., Sequence]
MakePrompt = Callable[[random.Random, int], list[int]]


class LateRunner(DigestRunner):
    """The digest engine, whose KV lies in the pool only when its step is nearly over."""

    def forward(self, batch: StepBatch) -> Float32Array:
        assert self._blocks is not None
        entries = self._blocks.reshape(len(self._blocks), BLOCK, -1, copy=False)
        entries[np.divmod(batch.slot_mapping, BLOCK)] = 0xEE
        threading.Event().wait(0.001)
        return super().forward(batch)


class ExactingMover:
    """Loads nothing and stores nothing, but takes its time and minds its blocks."""

    is_enabled = True
    max_cold_blocks = 0

    def __init__(self) -> None:
        self.num_loads = 0
        self.stored: dict[bytes, bytes] = {}
        self.changed: list[int] = []
        self._jobs: deque[LoadJob | StoreJob] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run)

    def start(self, pool: HbmPool, block_tokens: int, deliver: Deliver) -> None:
        self._pool, self._deliver = pool, deliver
        self._thread.start()

    def load(self, job: LoadJob) -> None:
        self._take(job)

    def prefetch(self, job: PrefetchJob) -> None:
        """There is nothing below."""

    def store(self, job: StoreJob) -> bool:
        self._take(job)
        return True

    def give_back(self, cold: ColdBlocks) -> None:
        """There are none."""

    def stop(self) -> None:
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join()

    def stats(self) -> MoverStats:
        return MoverStats()

    def _take(self, job: LoadJob | StoreJob) -> None:
        with self._wake:
            self._jobs.append(job)
            self._wake.notify()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if isinstance(job, LoadJob):
                self._overwrite(job)
            else:
                self._watch(job)
            self._deliver(job)

    def _next(self) -> LoadJob | StoreJob | None:
        with self._wake:
            self._wake.wait_for(lambda: self._jobs or self._is_stopping)
            return self._jobs.popleft() if self._jobs else None

    def _overwrite(self, job: LoadJob) -> None:
        self.num_loads += 1
        for value in range(8):
            for block_id in job.block_ids:
                self._pool.begin_write(block_id)[:] = value
                self._pool.finish_write(block_id)
            threading.Event().wait(HOLD_S / 2)
        self._pool.settle()

    def _watch(self, job: StoreJob) -> None:
        full = job.block_ids[: len(job.keys)]
        before = [data.tobytes() for data in self._pool.read(full)]
        threading.Event().wait(HOLD_S)
        after = [data.tobytes() for data in self._pool.read(full)]
        self.changed += [b for b, x, y in zip(full, before, after, strict=True) if x != y]
        for key, data in zip(job.keys, after, strict=True):
            self.stored[key] = data


def churn(engine: Any, asked: list[Sequence], rng: random.Random) -> None:
    """Run all; of a half, some are cancelled while their blocks are in a move, some as they run."""
    doomed = set(asked[::2])

    def cancel(running: Sequence) -> None:
        moving = [s for s in doomed if s.phase in (SequencePhase.LOADING, SequencePhase.STORING)]
        for each in moving or {running} & doomed:
            if rng.random() < 0.2:
                doomed.discard(each)
                engine.engine.cancel(each.request_id)

    engine.sink.on_token = cancel
    for each in asked:
        engine.engine.submit(each)
    engine.sink.wait_ended(*asked)
    engine.wait_at_rest()


def test_no_step_and_no_other_move_touches_the_blocks_of_a_move_under_way(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    """Faults 1, 2 (a store that runs ahead of the KV) and 3 (a load into what a step still reads)."""
    rng = random.Random(2)
    shared = prompts(rng, 50)
    asked = [
        sequence(f"r{n}", (shared if n % 2 else []) + prompts(rng, rng.randrange(5, 90)), 48)
        for n in range(24)
    ]
    texts = [list(each.tokens) for each in asked]
    expected = [engines.reference(text, 48) for text in texts]
    mover = ExactingMover()
    engine = engines.start(runner=LateRunner(), mover=mover, num_blocks=NUM_BLOCKS)
    churn(engine, asked, rng)
    assert engine.engine.stats().num_preemptions > 0
    assert mover.num_loads > len(asked) // 2
    assert mover.changed == []
    for each, tokens in zip(asked, expected, strict=True):
        got = engine.sink.tokens.get(each, [])
        assert got == tokens[: len(got)]
    assert mover.stored == own_blocks([each.tokens for each in asked], mover.stored)


def own_blocks(texts: list[list[int]], wanted: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The blocks of these keys, as a runner by itself computes them for the texts."""
    runner = DigestRunner()
    pool = runner.make_pool(64)
    blocks: dict[bytes, bytes] = {}
    for text in texts:
        num_tokens = len(text) // BLOCK * BLOCK
        if num_tokens:
            runner.forward(one_prompt(text[:num_tokens]))
            data = (block.tobytes() for block in pool.read(range(num_tokens // BLOCK)))
            blocks |= zip(BlockHasher(ROOT).keys(text, BLOCK), data, strict=True)
    return {key: data for key, data in blocks.items() if key in wanted}


def one_prompt(tokens: list[int]) -> StepBatch:
    count = len(tokens)
    return StepBatch(
        token_ids=np.array(tokens, np.int64),
        positions=np.arange(count),
        slot_mapping=np.arange(count),
        cu_query_lens=np.array([0, count], np.int32),
        context_lens=np.array([count], np.int32),
        block_tables=np.arange(count // BLOCK, dtype=np.int32)[None],
        logit_rows=np.array([count - 1]),
        histories=[tokens],
        num_prompt_tokens=[count],
    )


@pytest.mark.parametrize("hands_over", [False, True])
def test_the_block_that_the_last_sampled_token_would_fill_is_offered_to_no_tier(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt, *, hands_over: bool
) -> None:
    """Fault 4: that token never went through a step."""
    mover = ExactingMover()
    engine = engines.start(mover=mover)
    one = sequence("r", prompts(random.Random(3), 31), 33, hands_over=hands_over)
    engine.engine.submit(one)
    if hands_over:
        engine.sink.wait(lambda: one in engine.sink.prefilled)
    else:
        engine.sink.wait_ended(one)
    engine.wait_at_rest()
    keys = BlockHasher(ROOT).keys(one.tokens, BLOCK)
    assert len(one.tokens) % BLOCK == 0
    assert list(mover.stored) == keys[:-1]
