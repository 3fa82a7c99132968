"""What an engine does when a part of it fails, and when it is stopped."""

# ruff: noqa: S311 - random prompts, no secrets

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.protocol.failure import Ending, FailureCode, FinishReason
from workers.model import Float32Array, StepBatch
from workers.models.digest import DigestRunner
from workers.sequence import Sequence
from workers.step_loop import EngineStopped

BLOCK = 16
MakeSequence = Callable[..., Sequence]
MakePrompt = Callable[[random.Random, int], list[int]]

STOP = Ending(reason=FinishReason.STOP)
LENGTH = Ending(reason=FinishReason.LENGTH)
CANCELLED = Ending(reason=FinishReason.CANCELLED)


class FaultyRunner(DigestRunner):
    """The digest engine whose next `num_faults` steps fail half way."""

    def __init__(self, num_faults: int = 0) -> None:
        super().__init__()
        self.num_faults = num_faults

    def forward(self, batch: StepBatch) -> Float32Array:
        logits = super().forward(batch)
        if self.num_faults > 0:
            self.num_faults -= 1
            raise RuntimeError("device lost")
        return logits


def test_a_failed_step_ends_its_sequences_and_the_engine_goes_on(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    runner = FaultyRunner(num_faults=2)
    engine = engines.start(runner=runner)
    prompt = prompts(random.Random(15), 64)
    broken = Ending(failure=FailureCode.INTERNAL_ERROR)
    for number in range(2):
        hurt = sequence(f"hurt{number}", prompt)
        engine.run(hurt)
        assert engine.sink.endings[hurt] == broken
    healthy = sequence("healthy", prompt)
    assert engine.run(healthy) == [engines.reference(prompt)]
    assert healthy.num_cached == 0  # nothing of the failed steps was registered
    assert engine.engine.stats().num_failed_steps == 2
    assert not engine.engine.failed.is_set()


@pytest.mark.parametrize("poison", [{"prompt": [40, 10**6]}, {"prompt": [-1]}, {"root": b"short"}])
def test_a_request_that_cannot_run_harms_no_other(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt, poison: dict[str, Any]
) -> None:
    prompt = prompts(random.Random(17), 30)
    expected = engines.reference(prompt, 40)
    engine = engines.start()
    healthy = sequence("healthy", prompt, 40)
    bad = sequence("bad", poison.get("prompt", prompt), key_root=poison.get("root", bytes(32)))
    assert engine.run(healthy, bad)[0] == expected
    assert engine.sink.endings[bad] == Ending(failure=FailureCode.INTERNAL_ERROR)
    assert engine.engine.stats().num_failed_steps == 0


def test_a_stop_matcher_that_fails_ends_its_own_sequence_only(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    class BrokenMatcher:
        def feed(self, token_id: int) -> bool:
            raise RuntimeError(token_id)

    engine = engines.start(
        stop_matcher=lambda each: BrokenMatcher() if each.request_id == "bad" else None
    )
    prompt = prompts(random.Random(18), 30)
    healthy, bad = sequence("healthy", prompt, 40), sequence("bad", prompt, 40)
    assert engine.run(healthy, bad)[0] == engines.reference(prompt, 40)
    assert engine.sink.endings[bad] == Ending(failure=FailureCode.INTERNAL_ERROR)


def test_three_failed_steps_in_a_row_stop_the_engine(engines: Any, sequence: MakeSequence) -> None:
    engine = engines.start(runner=FaultyRunner(num_faults=99), max_batch_sequences=1)
    sequences = [sequence(f"r{number}", [40] * 20) for number in range(5)]
    for each in sequences:
        engine.engine.submit(each)
    assert engine.engine.failed.wait(30)
    assert engine.engine.stop(0) == sequences[3:]
    engine.wait_at_rest()


def test_an_engine_that_cannot_start_says_so(engines: Any) -> None:
    class BadRunner(DigestRunner):
        def warm_up(self) -> None:
            raise RuntimeError("no kernel image")

    engine = engines.start(runner=BadRunner())
    assert engine.engine.failed.is_set()


def test_a_drained_engine_finishes_what_runs_and_returns_what_waits(
    engines: Any, sequence: MakeSequence
) -> None:
    engine = engines.start(runner=DigestRunner(step_delay_ms=1), max_batch_sequences=2)
    sequences = [sequence(f"r{number}", [40 + number] * 20, 50) for number in range(4)]
    for each in sequences:
        engine.engine.submit(each)
    engine.sink.wait(lambda: len(engine.sink.tokens) == 2)
    assert engine.engine.stop(30) == sequences[2:]
    assert set(engine.sink.endings) == set(sequences[:2])
    with pytest.raises(EngineStopped):
        engine.engine.submit(sequences[2])


def test_a_sequence_that_comes_at_the_very_end_is_returned_or_refused(
    engines: Any, sequence: MakeSequence
) -> None:
    coming, has_stopped = threading.Event(), threading.Event()

    class SlowInbox(deque[Any]):
        def append(self, command: Any) -> None:
            coming.set()
            has_stopped.wait(0.5)
            super().append(command)

    engine = engines.start().engine
    engine._inbox = SlowInbox()
    late = sequence("late", [40] * 20)
    thread = threading.Thread(target=engine.submit, args=(late,))
    thread.start()
    assert coming.wait(10)
    left = engine.stop(0)
    has_stopped.set()
    thread.join()
    assert left == [late]


def test_sequences_that_outlast_the_drain_are_returned_without_an_ending(
    engines: Any, sequence: MakeSequence
) -> None:
    engine = engines.start(runner=DigestRunner(step_delay_ms=5))
    one = sequence("one", [40] * 20, 400)
    engine.engine.submit(one)
    engine.sink.wait(lambda: one in engine.sink.tokens)
    assert engine.engine.stop(0.05) == [one]
    assert engine.sink.endings == {}
    assert one.ending is None
    engine.wait_at_rest()
