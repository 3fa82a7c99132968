"""A context larger than the HBM pool whose cold blocks are lost, overwritten or spoilt: the same tokens."""

# ruff: noqa: S311 - random prompts, no secrets

from __future__ import annotations

import mmap
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipeline.protocol.failure import Ending, FailureCode
from tests.workers.tiered import BLOCK, LENGTH, MakePrompt, MakeSequence
from tiering.kvd.client import KvdClient
from workers.kv_jobs import PrefetchJob
from workers.model import Float32Array, StepBatch
from workers.models.digest import DigestRunner

POOL_BLOCKS = 8
LIMIT_S = 30.0


def test_a_long_context_whose_daemon_does_not_come_back_ends_with_an_error(
    engines: Any,
    kvd: Any,
    sequence: MakeSequence,
    prompts: MakePrompt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.long_runs._MAX_STALLS", 3)
    engine = engines.start(mover=kvd.mover(), num_blocks=POOL_BLOCKS)
    kvd.kill()
    rng = random.Random(11)
    asked, short = sequence("long", prompts(rng, 400), 40), sequence("short", prompts(rng, 20), 4)

    assert engine.run(asked, short) == [[], engines.reference(short.tokens[:20], 4)]

    assert engine.sink.endings[asked] == Ending(failure=FailureCode.NO_WORKERS)
    assert engine.sink.endings[short] == LENGTH
    engine.wait_at_rest()


class HookedRunner(DigestRunner):
    """The digest engine that tells of every step, before or after its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[int], None] = lambda _: None
        self._num_steps = 0

    def forward(self, batch: StepBatch) -> Float32Array:
        self._num_steps += 1
        self.before(self._num_steps)
        return super().forward(batch)


@pytest.mark.parametrize("kill_at", [13, 30])
def test_a_daemon_killed_under_a_long_context_costs_a_recompute_and_no_token(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt, kill_at: int
) -> None:
    prompt = prompts(random.Random(kill_at), 400)
    expected = engines.reference(prompt, 40)
    runner = HookedRunner()

    def kill(step: int) -> None:
        if step == kill_at:
            kvd.kill()
            kvd.start()

    engine = engines.start(
        runner=runner, mover=kvd.mover(), num_blocks=POOL_BLOCKS, max_batch_tokens=32
    )
    runner.before = kill
    asked = sequence("long", prompt, 40)

    assert engine.run(asked) == [expected]

    assert engine.engine.stats().num_preemptions == 1
    engine.wait_at_rest()
    kvd.wait_no_leases()


def fill(client: KvdClient, num_blocks: int) -> None:
    """Other bytes into every slot that kvd gives."""
    rng = np.random.default_rng(1)
    for _ in range(0, num_blocks, 64):
        keys = [rng.bytes(16) for _ in range(64)]
        reservations = [each for each in client.reserve(keys) if each is not None]
        for each in reservations:
            client.write(each, rng.integers(0, 255, 512).astype(np.uint8), BLOCK)
        client.commit(reservations)


def test_slots_that_others_fill_once_the_connection_is_lost_make_no_wrong_token(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    """The mover gives up a daemon that is late; that one gives its leases up, and the slots away."""
    prompt = prompts(random.Random(9), 400)
    expected = engines.reference(prompt, 60)
    runner = HookedRunner()
    mover = kvd.mover(timeout_s=0.2)
    engine = engines.start(runner=runner, mover=mover, num_blocks=POOL_BLOCKS, max_batch_tokens=32)

    def overwrite(step: int) -> None:
        if step != 24 or kvd.process is None:
            return
        kvd.process.send_signal(signal.SIGSTOP)
        mover.prefetch(PrefetchJob([b"anything of all!"]))
        limit_s = time.monotonic() + LIMIT_S
        while mover.stats().num_unavailable == 0:
            assert time.monotonic() < limit_s
        kvd.process.send_signal(signal.SIGCONT)
        other = kvd.client("other")
        other.connect()
        fill(other, 4 * other.shared_slab.num_slots)
        other.close()

    runner.before = overwrite
    assert engine.run(sequence("long", prompt, 60)) == [expected]
    assert engine.engine.stats().num_preemptions >= 1
    engine.wait_at_rest()
    kvd.wait_no_leases()


def test_a_corrupt_block_in_dram_is_computed_again(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(10), 400)
    expected = engines.reference(prompt, 10)
    engine = engines.start(mover=kvd.mover(), num_blocks=POOL_BLOCKS)
    first = sequence("first", list(prompt), 10)
    assert engine.run(first) == [expected]
    engine.wait_at_rest()
    client = kvd.client("spoiler")
    client.connect()
    lease = client.acquire(first.block_keys[:24])
    memory = mmap.mmap(client.shared_slab.descriptor, client.shared_slab.num_bytes)
    memory[lease.blocks[13].slot * 4096 + 100] ^= 1
    client.release(lease)
    client.close()
    again = sequence("again", list(prompt), 10)

    assert engine.run(again) == [expected]

    assert again.num_cached == 13 * BLOCK
    memory.close()
