"""Load or recompute, prefetch, and the deadline of a load: real engines over a real cache daemon."""

# ruff: noqa: S311 - random prompts, no secrets

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.protocol.cache_use import CacheUse, LoadReason
from pipeline.protocol.request import Priority
from pipeline.scheduling.transfer_cost import LoadPolicy
from tiering.block_hash import BlockHasher
from tiering.kvd.client import KvdClient
from tiering.lease import BlockLease
from workers.kv_mover import KvdMover
from workers.models.digest import DigestRunner
from workers.sequence import Sequence

MakeSequence = Callable[..., Sequence]
MakePrompt = Callable[[random.Random, int], list[int]]


def warm(engine: Any, sequence: MakeSequence, prompt: list[int]) -> None:
    """Have the tiers hold the prompt's blocks, and HBM nothing."""
    engine.run(sequence("warm", list(prompt)))
    engine.wait_at_rest()
    engine.forget_cached()


def told(sequence: Sequence) -> CacheUse:
    """Its cache use without the times."""
    assert sequence.cache_use is not None
    times = dict.fromkeys(("estimated_ms", "compute_ms", "taken_ms"))
    return sequence.cache_use.model_copy(update=times)


def test_a_request_tells_which_tier_gave_it_how_many_tokens(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(1), 100)
    engine = engines.start(mover=kvd.mover())
    cold = sequence("cold", list(prompt))
    engine.run(cold)
    engine.wait_at_rest()
    hot = sequence("hot", list(prompt))
    engine.run(hot)
    engine.forget_cached()
    warm_one = sequence("warm", list(prompt))
    engine.run(warm_one)
    engine.engine.stop(5)
    kvd.end()
    kvd.start()  # what DRAM had lies on the disk now
    other = engines.start(mover=kvd.mover())
    from_disk = sequence("disk", list(prompt))
    other.run(from_disk)

    assert told(cold) == CacheUse(load=LoadReason.ABSENT)
    assert told(hot) == CacheUse(hbm_tokens=96)
    assert told(warm_one) == CacheUse(dram_tokens=96, load=LoadReason.ALWAYS)
    assert told(from_disk) == CacheUse(nvme_tokens=96, load=LoadReason.ALWAYS)
    taken = [each.cache_use.taken_ms for each in (cold, hot, warm_one, from_disk)]
    assert [ms is not None for ms in taken] == [False, False, True, True]
    mover = other.engine.stats().mover
    assert mover.num_promoted_bytes == 6 * 512
    assert mover.promotion_s > 0


class FarClient(KvdClient):
    """A client whose every question takes longer than the digest engine takes for 16 tokens."""

    pause = threading.Event()

    def locate(self, keys: Any) -> tuple[int, int]:
        self.pause.wait(0.3)
        return super().locate(keys)


def test_where_computing_is_faster_than_loading_it_is_computed_and_the_reason_is_told(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(2), 17)
    expected = engines.reference(prompt)
    mover = KvdMover(
        lambda: FarClient(kvd.socket_path, 512, "far", timeout_s=5.0),
        max_pending_blocks=8,
        policy=LoadPolicy.COST,
    )
    engine = engines.start(mover=mover)
    warm(engine, sequence, prompt)
    reasons = []
    for number in range(3):
        again = sequence(f"r{number}", list(prompt))
        assert engine.run(again) == [expected]
        engine.wait_at_rest()
        engine.forget_cached()
        assert again.cache_use is not None
        reasons.append(again.cache_use.load)
        assert again.num_cached == (16 if reasons[-1] is LoadReason.UNMEASURED else 0)
        assert again.cache_use.recomputed_tokens == 16 - again.num_cached
    assert again.cache_use is not None
    assert again.cache_use.estimated_ms > again.cache_use.compute_ms > 0
    assert again.cache_use.taken_ms is None
    assert reasons == [LoadReason.UNMEASURED, LoadReason.TOO_SHORT, LoadReason.TOO_SHORT]
    assert engine.engine.stats().mover.load_reasons == {
        "absent": 1,
        "unmeasured": 1,
        "too_short": 2,
    }


def test_where_computing_is_slow_the_blocks_are_loaded(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(3), 400)
    engine = engines.start(
        runner=DigestRunner(step_delay_ms=100),
        mover=kvd.mover(policy=LoadPolicy.COST),
        max_batch_tokens=64,
    )
    warm(engine, sequence, prompt)
    for number in range(2):
        again = sequence(f"r{number}", list(prompt), 1)
        engine.run(again)
        engine.wait_at_rest()
        engine.forget_cached()
    assert told(again) == CacheUse(dram_tokens=384, load=LoadReason.FASTER)
    use = again.cache_use
    assert use is not None
    assert 0 < use.estimated_ms < use.compute_ms
    assert use.taken_ms > 0


class LateClient(KvdClient):
    """A client whose third block takes longer than any deadline."""

    pause = threading.Event()

    def load(self, lease: BlockLease, index: int, into: Any) -> bool:
        if index == 2:
            self.pause.wait(2.2)
        return super().load(lease, index, into)


def test_a_late_load_keeps_what_has_come_and_the_rest_is_computed(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(4), 100)
    expected = engines.reference(prompt)
    warm(engines.start(mover=kvd.mover("first")), sequence, prompt)
    mover = KvdMover(
        lambda: LateClient(kvd.socket_path, 512, "late", timeout_s=5.0),
        max_pending_blocks=8,
        policy=LoadPolicy.ALWAYS,
    )
    engine = engines.start(mover=mover)
    late = sequence("late", list(prompt))
    assert engine.run(late) == [expected]
    # The third block was under way at the deadline, and came whole.
    assert told(late) == CacheUse(dram_tokens=48, recomputed_tokens=48, load=LoadReason.LATE)
    assert late.cache_use is not None
    assert late.cache_use.taken_ms > 2000
    assert engine.engine.stats().num_prefill_tokens == 52
    engine.wait_at_rest()


def test_blocks_of_waiting_sequences_are_fetched_from_nvme_by_priority_and_not_for_the_cancelled(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt, paced_runner: Any
) -> None:
    rng = random.Random(5)
    asked = [prompts(rng, 100) for _ in range(8)]
    first = engines.start(mover=kvd.mover("first"))
    for number, prompt in enumerate(asked):
        first.run(sequence(f"w{number}", list(prompt)))
    first.engine.stop(5)
    kvd.end()
    kvd.start()
    client = kvd.client("observer")
    client.connect()
    keys = [list(engines_keys(sequence, prompt)) for prompt in asked]
    assert [client.locate(each) for each in keys] == [(0, 6)] * 8

    mover = kvd.mover()
    engine = engines.start(runner=paced_runner, mover=mover, max_batch_sequences=1)
    running = sequence("running", prompts(rng, 20), 400)
    engine.engine.submit(running)
    assert paced_runner.waits.wait(30)
    kvd.process.send_signal(signal.SIGSTOP)
    ranks = [Priority.LOW] * 4 + [Priority.HIGH] * 4
    waiting = [
        sequence(f"r{number}", list(prompt), priority=rank)
        for number, (prompt, rank) in enumerate(zip(asked, ranks, strict=True))
    ]
    for each in waiting:  # all of them before the engine looks again, for it is in a step
        engine.engine.submit(each)
    paced_runner.leave.release(2)
    engine.wait_stats(lambda stats: stats.waiting == 8)
    for number in (5, 6):  # the first one's fetch may be under way
        engine.engine.cancel(f"r{number}")
    paced_runner.leave.release(2)
    engine.sink.wait_ended(waiting[5], waiting[6])
    kvd.process.send_signal(signal.SIGCONT)
    engine.wait_stats(lambda _: mover.stats().num_prefetched_blocks >= 24)
    # The first four in line that are left: two of high priority, then two that came first.
    found = [client.locate(each) for each in keys]
    assert found == [(6 if number in (0, 1, 4, 7) else 0, 6) for number in range(8)]
    client.close()
    engine.engine.cancel("running")
    paced_runner.leave.release(1000)
    left = [waiting[number] for number in (0, 1, 2, 3, 4, 7)]
    engine.sink.wait_ended(*left)
    uses = [each.cache_use for each in left]
    assert all(use is not None and use.dram_tokens + use.nvme_tokens == 96 for use in uses)
    assert [use.dram_tokens for use in uses[:2] + uses[4:] if use] == [96] * 4
    assert engine.sink.tokens[waiting[0]] == engines.reference(asked[0])


def engines_keys(sequence: MakeSequence, prompt: list[int]) -> list[bytes]:
    return BlockHasher(sequence("keys", [65]).key_root).keys(prompt, 16)


@pytest.mark.parametrize("num_loads", [3])
def test_settings_can_forbid_loads(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt, num_loads: int
) -> None:
    prompt = prompts(random.Random(6), 100)
    engine = engines.start(mover=kvd.mover(policy=LoadPolicy.NEVER))
    warm(engine, sequence, prompt)
    for number in range(num_loads):
        again = sequence(f"r{number}", list(prompt))
        engine.run(again)
        engine.wait_at_rest()
        engine.forget_cached()
        assert told(again) == CacheUse(recomputed_tokens=96, load=LoadReason.NEVER)
    assert engine.engine.stats().mover.num_loaded_blocks == 0


class ForgetfulClient(KvdClient):
    """A client whose blocks are dropped between the question and the load, from the third on."""

    def acquire(self, keys: Any, **options: Any) -> BlockLease:
        self.discard(keys[2:])
        return super().acquire(keys, **options)


def test_blocks_that_leave_their_tier_before_they_are_loaded_are_told_to_be_gone(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(7), 100)
    expected = engines.reference(prompt)
    warm(engines.start(mover=kvd.mover("first")), sequence, prompt)
    mover = KvdMover(
        lambda: ForgetfulClient(kvd.socket_path, 512, "forgets", timeout_s=5.0),
        max_pending_blocks=8,
        policy=LoadPolicy.ALWAYS,
    )
    again = sequence("again", list(prompt))
    assert engines.start(mover=mover).run(again) == [expected]
    assert told(again) == CacheUse(dram_tokens=32, recomputed_tokens=64, load=LoadReason.GONE)


def test_without_a_daemon_the_reason_is_that(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(8), 100)
    engine = engines.start(mover=kvd.mover())
    kvd.kill()
    asked = sequence("asked", list(prompt))
    engine.run(asked)
    assert told(asked) == CacheUse(load=LoadReason.UNAVAILABLE)
