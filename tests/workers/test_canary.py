"""A worker finds out by itself that its engine does not come back, and bothers it only when idle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workers.canary import Canary
from workers.model import Float32Array, StepBatch
from workers.models.digest import DigestRunner
from workers.sequence import Sequence

ROOT = bytes(32)


def make_canary(engine: Any, idle_s: float = 30.0, limit_s: float = 15.0) -> Canary:
    return Canary(engine, ROOT, idle_s, limit_s)


def look_until(canary: Canary, begin_s: int, end_s: int) -> None:
    """A look each second, as the heartbeat gives."""
    for now_s in range(begin_s, end_s + 1):
        canary.look(float(now_s))


def test_an_idle_engine_generates_and_is_well(engines: Any) -> None:
    running = engines.start()
    canary = make_canary(running.engine)

    look_until(canary, 0, 29)
    assert running.engine.stats().num_steps == 0
    look_until(canary, 30, 31)
    running.wait_stats(lambda stats: stats.num_steps == 2)
    running.wait_at_rest()
    look_until(canary, 32, 60)
    assert not canary.is_stuck


def test_a_busy_engine_is_given_nothing(engines: Any, sequence: Callable[..., Sequence]) -> None:
    running = engines.start()
    canary = make_canary(running.engine)

    for second in range(100):
        running.run(sequence(f"work-{second}", [5, 6, 7], 2))
        canary.look(float(second))

    assert running.engine.stats().num_steps == 200
    assert not canary.is_stuck


def test_an_idle_time_of_zero_sends_nothing(engines: Any) -> None:
    running = engines.start()
    canary = make_canary(running.engine, idle_s=0.0)

    look_until(canary, 0, 200)

    assert running.engine.stats().num_steps == 0
    assert running.engine.turn_under_way == 0


def test_an_idle_engine_that_does_not_come_back_is_stuck_until_it_does(
    engines: Any, paced_runner: Any
) -> None:
    running = engines.start(runner=paced_runner)
    canary = make_canary(running.engine)
    look_until(canary, 0, 44)
    assert not canary.is_stuck
    look_until(canary, 45, 48)
    assert canary.is_stuck

    paced_runner.leave.release(2)
    running.wait_stats(lambda stats: stats.num_steps == 2)
    running.wait_at_rest()
    look_until(canary, 49, 50)
    assert not canary.is_stuck


def test_a_busy_engine_that_does_not_come_back_is_stuck_without_a_canary(
    engines: Any, paced_runner: Any, sequence: Callable[..., Sequence]
) -> None:
    running = engines.start(runner=paced_runner)
    canary = make_canary(running.engine, idle_s=0.0)
    work = sequence("work", [5, 6, 7], 2)
    running.engine.submit(work)
    running.sink.wait(lambda: bool(running.sink.admitted))

    look_until(canary, 0, 20)
    assert canary.is_stuck
    assert canary.waited_s >= 19
    paced_runner.leave.release(2)
    running.sink.wait_ended(work)


def test_a_process_that_stood_still_does_not_blame_its_engine(
    engines: Any, paced_runner: Any, sequence: Callable[..., Sequence]
) -> None:
    running = engines.start(runner=paced_runner)
    canary = make_canary(running.engine)
    work = sequence("work", [5, 6, 7], 2)
    running.engine.submit(work)
    running.sink.wait(lambda: bool(running.sink.admitted))

    canary.look(0.0)
    canary.look(3600.0)

    assert not canary.is_stuck
    paced_runner.leave.release(2)
    running.sink.wait_ended(work)


class BrokenRunner(DigestRunner):
    """A device that is gone: each step raises."""

    def forward(self, batch: StepBatch) -> Float32Array:
        raise RuntimeError("the device is gone")


def test_an_idle_engine_whose_steps_fail_ends_soon(engines: Any) -> None:
    running = engines.start(runner=BrokenRunner())
    canary = make_canary(running.engine)

    look_until(canary, 0, 31)
    for second in range(32, 1000):
        canary.look(float(second))
        if running.engine.failed.wait(0.05):
            break

    assert running.engine.failed.is_set()
    assert running.engine.stats().num_failed_steps == 3
