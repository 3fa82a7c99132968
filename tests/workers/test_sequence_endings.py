"""How sequences end on an engine: by themselves, by command, by the clock, for want of room."""

# ruff: noqa: S311 - random prompts, no secrets

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pipeline.protocol.failure import Ending, FailureCode, FinishReason
from workers.model import ModelSpec
from workers.models.digest import DigestRunner
from workers.sequence import Sequence

BLOCK = 16
MakeSequence = Callable[..., Sequence]
MakePrompt = Callable[[random.Random, int], list[int]]

STOP = Ending(reason=FinishReason.STOP)
LENGTH = Ending(reason=FinishReason.LENGTH)
CANCELLED = Ending(reason=FinishReason.CANCELLED)


class EosRunner(DigestRunner):
    """The digest engine with some printable tokens as end-of-text."""

    def __init__(self, eos_token_ids: set[int]) -> None:
        super().__init__()
        self._eos_token_ids = frozenset(eos_token_ids)

    @property
    def spec(self) -> ModelSpec:
        return replace(super().spec, eos_token_ids=self._eos_token_ids)


class PairMatcher:
    """Completes when two given tokens follow each other."""

    def __init__(self, pair: tuple[int, int]) -> None:
        self._pair = pair
        self._last = -1

    def feed(self, token_id: int) -> bool:
        is_complete = (self._last, token_id) == self._pair
        self._last = token_id
        return is_complete


def test_a_cancelled_request_gets_its_ending_and_no_more_tokens(
    engines: Any, sequence: MakeSequence, paced_runner: Any
) -> None:
    engine = engines.start(runner=paced_runner)
    one, other = sequence("one", [40] * 20, 50), sequence("other", [41] * 20, 3)
    engine.engine.submit(one)
    engine.engine.submit(other)
    engine.engine.cancel("one")
    engine.engine.cancel("nobody")
    paced_runner.leave.release(100)
    engine.sink.wait_ended(one, other)
    assert engine.sink.endings == {one: CANCELLED, other: LENGTH}
    assert len(engine.sink.tokens[one]) <= 1


def test_a_stale_attempt_is_dropped_in_silence_and_the_new_one_goes_on(
    engines: Any, sequence: MakeSequence
) -> None:
    engine = engines.start()
    stale, fresh = sequence("r", [40] * 20, 400), sequence("r", [40] * 20, 400, attempt=2)
    engine.engine.submit(stale)
    engine.engine.cancel("r", 1, silent=True)
    engine.engine.submit(fresh)
    engine.sink.wait_ended(fresh)
    engine.wait_at_rest()
    assert stale not in engine.sink.endings


def test_a_cancel_may_name_another_ending(engines: Any, sequence: MakeSequence) -> None:
    engine = engines.start()
    one = sequence("one", [40] * 20, 400)
    lost = Ending(failure=FailureCode.WORKER_LOST)
    engine.engine.submit(one)
    engine.engine.cancel("one", ending=lost)
    engine.sink.wait_ended(one)
    assert engine.sink.endings[one] == lost


def test_end_of_text_ends_the_output_without_being_part_of_it(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(10), 20)
    tokens = engines.reference(prompt, 40)
    eos = tokens[20]
    engine = engines.start(runner=EosRunner({eos}))
    one, ignoring = sequence("one", prompt, 40), sequence("two", prompt, 40, ignore_eos=True)
    assert engine.run(one, ignoring) == [tokens[: tokens.index(eos)], tokens]
    assert engine.sink.endings == {one: STOP, ignoring: LENGTH}
    assert engine.sink.steps[-1][-1].index == 39


def test_a_stop_token_ends_the_output_like_end_of_text(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(11), 20)
    tokens = engines.reference(prompt, 40)
    engine = engines.start()
    one = sequence("one", prompt, 40, stop_token_ids=(tokens[7],))
    assert engine.run(one) == [tokens[: tokens.index(tokens[7])]]
    assert engine.sink.endings[one] == STOP


def test_a_stop_string_ends_the_output_behind_its_last_token(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(12), 20)
    tokens = engines.reference(prompt, 40)
    engine = engines.start(stop_matcher=lambda _: PairMatcher((tokens[7], tokens[8])))
    one = sequence("one", prompt, 40)
    assert engine.run(one) == [tokens[:9]]
    assert engine.sink.endings[one] == STOP


def test_a_stop_string_across_two_attempts_is_found(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(12), 20)
    tokens = engines.reference(prompt, 40)
    engine = engines.start(stop_matcher=lambda _: PairMatcher((tokens[7], tokens[8])))
    half = sequence("half", prompt, 40, logged=tokens[:8], attempt=2)
    whole = sequence("whole", prompt, 40, logged=tokens[:9], attempt=2)
    assert engine.run(half, whole) == [[tokens[8]], []]
    assert engine.sink.endings == {half: STOP, whole: STOP}


def test_a_full_context_ends_the_output(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    engine = engines.start()
    one = sequence("one", prompts(random.Random(13), 500), 100)
    (tokens,) = engine.run(one)
    assert len(tokens) == 12
    assert engine.sink.endings[one] == LENGTH


@pytest.mark.parametrize("num_logged", [1, 5, 12, 13, 29])
def test_a_recovered_request_goes_on_where_it_was(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt, num_logged: int
) -> None:
    prompt = prompts(random.Random(14), 20)
    tokens = engines.reference(prompt, 30, temperature=0.9, seed=5)
    engine = engines.start()
    rest = sequence("r", prompt, 30, temperature=0.9, seed=5, attempt=2, logged=tokens[:num_logged])
    assert engine.run(rest) == [tokens[num_logged:]]


def test_a_request_recovered_behind_its_last_token_ends_without_one(
    engines: Any, sequence: MakeSequence
) -> None:
    engine = engines.start()
    one = sequence("one", [40] * 20, 3, logged=[50, 51, 52], attempt=2)
    assert engine.run(one) == [[]]
    assert engine.sink.endings[one] == LENGTH


def test_a_deadline_ends_a_running_and_a_waiting_request(
    engines: Any, sequence: MakeSequence
) -> None:
    runner = DigestRunner(step_delay_ms=5)
    engine = engines.start(runner=runner, max_batch_sequences=1)
    soon_s = time.monotonic() + 0.1
    running = sequence("running", [40] * 20, 400, deadline_s=soon_s)
    waiting = sequence("waiting", [41] * 20, 400, deadline_s=soon_s)
    engine.run(running, waiting)
    late = Ending(failure=FailureCode.DEADLINE_EXCEEDED)
    assert engine.sink.endings == {running: late, waiting: late}
    engine.wait_at_rest()


def test_a_prompt_that_never_fits_fails_at_once(engines: Any, sequence: MakeSequence) -> None:
    engine = engines.start(num_blocks=4)
    too_long, empty = sequence("long", [40] * 64), sequence("empty", [])
    fine = sequence("fine", [41] * 10)
    engine.run(too_long, empty, fine)
    broken = Ending(failure=FailureCode.INTERNAL_ERROR)
    unfit = Ending(failure=FailureCode.CONTEXT_EXCEEDED)
    assert engine.sink.endings == {too_long: unfit, empty: broken, fine: LENGTH}


def test_an_output_that_outgrows_the_pool_fails_and_others_go_on(
    engines: Any, sequence: MakeSequence
) -> None:
    engine = engines.start(num_blocks=4)
    one, two = sequence("one", [40] * 30, 400), sequence("two", [41] * 30, 10)
    engine.run(one, two)
    assert engine.sink.endings[one] == Ending(failure=FailureCode.CONTEXT_EXCEEDED)
    assert engine.sink.endings[two] == LENGTH
    engine.wait_at_rest()
