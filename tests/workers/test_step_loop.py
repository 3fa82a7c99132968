"""The engine without a cache daemon: every output equals that of the request run alone."""

# ruff: noqa: S311 - random prompts, no secrets

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.protocol.failure import Ending, FinishReason
from pipeline.protocol.request import Priority
from workers.models.digest import DigestRunner
from workers.sequence import Sequence

BLOCK = 16
MakeSequence = Callable[..., Sequence]
MakePrompt = Callable[[random.Random, int], list[int]]

STOP = Ending(reason=FinishReason.STOP)
LENGTH = Ending(reason=FinishReason.LENGTH)
CANCELLED = Ending(reason=FinishReason.CANCELLED)


@pytest.mark.parametrize("budget", [16, 48, 512])
def test_a_batch_of_mixed_lengths_equals_the_lone_runs(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt, budget: int
) -> None:
    rng = random.Random(budget)
    asked = [
        (prompts(rng, rng.randrange(1, 300)), rng.randrange(1, 40), rng.choice([0.0, 1.0]), seed)
        for seed in range(32)
    ]
    expected = [
        engines.reference(prompt, limit, temperature=temperature, seed=seed)
        for prompt, limit, temperature, seed in asked
    ]
    engine = engines.start(max_batch_tokens=budget, num_blocks=1024)
    sequences = [
        sequence(f"r{seed}", prompt, limit, temperature=temperature, seed=seed)
        for prompt, limit, temperature, seed in asked
    ]

    assert engine.run(*sequences) == expected
    assert all(engine.sink.endings[each] == LENGTH for each in sequences)
    engine.wait_at_rest()


def test_a_prompt_that_comes_is_expected_no_more(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    engine = engines.start()
    engine.engine.expect({Priority.NORMAL: 5, Priority.BATCH: 2})

    engine.run(sequence("r1", prompts(random.Random(1), 20), 3))

    expected = engine.engine._scheduler._expected
    assert expected == {Priority.NORMAL: 4, Priority.BATCH: 2}


def test_each_step_tells_of_all_its_tokens_in_one_call(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    engine = engines.start()
    rng = random.Random(1)
    engine.run(*[sequence(f"r{number}", prompts(rng, 20), 30) for number in range(8)])
    assert len(engine.sink.steps) <= engine.engine.stats().num_steps < 8 * 30


def test_prompts_with_a_shared_prefix_reuse_its_whole_blocks(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:  # C108
    rng = random.Random(2)
    head = prompts(rng, 48)
    asked = [head + prompts(rng, 20), head + prompts(rng, 20)]
    expected = [engines.reference(prompt) for prompt in asked]
    engine = engines.start()
    cached = []
    for number in range(100):
        one = sequence(f"a{number}", asked[number % 2])
        assert engine.run(one) == [expected[number % 2]]
        cached.append(one.num_cached)
    both = [sequence("x", asked[0]), sequence("y", asked[1])]

    assert engine.run(*both) == expected
    assert cached == [0, 48] + [64] * 98
    assert [each.num_cached for each in both] == [64, 64]
    engine.wait_at_rest()


def test_a_prompt_that_is_half_computed_shares_only_that_half(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt, paced_runner: Any
) -> None:
    prompt = prompts(random.Random(19), 300)
    engine = engines.start(runner=paced_runner, max_batch_tokens=100)
    first, second = sequence("first", prompt), sequence("second", prompt)
    engine.engine.submit(first)
    paced_runner.leave.release()
    engine.sink.wait(lambda: first in engine.sink.admitted)
    engine.engine.submit(second)
    paced_runner.leave.release(100)
    engine.sink.wait_ended(first, second)
    expected = engines.reference(prompt)
    assert engine.sink.tokens == {first: expected, second: expected}
    assert second.num_cached <= 200


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_the_same_prompt_again_computes_at_least_one_token(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt, length: int
) -> None:  # C109
    prompt = prompts(random.Random(length), length)
    expected = engines.reference(prompt)
    engine = engines.start()
    for number in range(3):
        again = sequence(f"r{number}", prompt)
        assert engine.run(again) == [expected]
        assert again.num_cached == (0 if number == 0 else (length - 1) // BLOCK * BLOCK)


def test_generated_blocks_are_reused_by_the_next_turn(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    rng = random.Random(3)
    engine = engines.start()
    first = sequence("first", prompts(rng, 20), 29)
    engine.run(first)
    prompt = first.tokens + prompts(rng, 5)
    second = sequence("second", prompt)
    assert engine.run(second) == [engines.reference(prompt)]
    assert second.num_cached == 48  # 49 tokens, the last of them was never computed


def test_the_last_sampled_token_never_completes_a_block(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:  # vllm#54193
    engine = engines.start()
    first = sequence("first", prompts(random.Random(4), 20), 12)
    engine.run(first)
    assert len(first.tokens) == 2 * BLOCK
    prompt = [*first.tokens, 65]
    second = sequence("second", prompt)
    assert engine.run(second) == [engines.reference(prompt)]
    assert second.num_cached == BLOCK


def test_a_sequence_that_may_leave_no_trace_neither_fills_nor_reads_the_cache(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(5), 64)
    engine = engines.start()
    engine.run(sequence("private", prompt, uses_cache=False))
    engine.wait_at_rest()
    assert engine.engine.stats().cached_blocks == 0
    engine.run(sequence("public", prompt))
    private = sequence("private again", prompt, uses_cache=False)
    engine.run(private)
    assert private.num_cached == 0


def test_other_roots_share_nothing(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(6), 64)
    engine = engines.start()
    engine.run(sequence("mine", prompt))
    theirs = sequence("theirs", prompt, key_root=bytes(32))
    engine.run(theirs)
    assert theirs.num_cached == 0


def test_sequences_preempted_in_a_small_pool_equal_the_lone_runs(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    rng = random.Random(7)
    asked = [prompts(rng, rng.randrange(20, 120)) for _ in range(24)]
    expected = [engines.reference(prompt, 100) for prompt in asked]
    engine = engines.start(num_blocks=64)

    outputs = engine.run(
        *[sequence(f"r{number}", prompt, 100) for number, prompt in enumerate(asked)]
    )

    assert outputs == expected
    assert engine.engine.stats().num_preemptions > 0
    engine.wait_at_rest()


def test_every_request_is_announced_once_even_if_it_is_preempted(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    rng = random.Random(8)
    engine = engines.start(num_blocks=16)
    sequences = [sequence(f"r{number}", prompts(rng, 40), 100) for number in range(6)]
    engine.run(*sequences)
    assert engine.engine.stats().num_preemptions > 0
    assert sorted(each.request_id for each in engine.sink.admitted) == [
        each.request_id for each in sequences
    ]


def test_cancels_at_random_steps_return_every_block(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    rng = random.Random(9)
    head = prompts(rng, 10 * BLOCK)
    engine = engines.start(num_blocks=64, max_batch_tokens=64)
    tails = [prompts(rng, rng.randrange(1, 30)) for _ in range(8)]
    expected = [engines.reference(head + tail, 24) for tail in tails]
    for number in range(200):
        sequences = [
            sequence(f"{number}.{index}", head + tail, 24) for index, tail in enumerate(tails)
        ]
        doomed = {each: rng.randrange(0, 24) for each in rng.sample(sequences, 4)}

        def cancel_in_time(sequence: Sequence, doomed: dict[Sequence, int] = doomed) -> None:
            if doomed.get(sequence) == sequence.num_generated:
                engine.engine.cancel(sequence.request_id)

        engine.sink.on_token = cancel_in_time
        for each in sequences:
            engine.engine.submit(each)
            if doomed.get(each) == 0:
                engine.engine.cancel(each.request_id)
        engine.sink.wait_ended(*sequences)
        engine.wait_at_rest()
        for each, tokens in zip(sequences, expected, strict=True):
            got = engine.sink.tokens[each]
            assert got == tokens[: len(got)]
            if each in doomed:
                assert len(got) <= doomed[each] + 1
            else:
                assert got == tokens


def test_high_priority_is_served_first(engines: Any, sequence: MakeSequence) -> None:
    engine = engines.start(runner=DigestRunner(step_delay_ms=1), max_batch_sequences=1)
    first = sequence("first", [40] * 20, 400)
    engine.engine.submit(first)
    engine.sink.wait(lambda: first in engine.sink.tokens)
    sequences = [
        sequence("batch", [41] * 20, priority=Priority.BATCH),
        sequence("normal", [42] * 20),
        sequence("high", [43] * 20, priority=Priority.HIGH),
    ]
    engine.run(*sequences)
    assert [each.request_id for each in engine.sink.admitted][1:] == ["high", "normal", "batch"]


def test_without_a_cache_daemon_a_hand_over_carries_no_blocks(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(16), 20)
    engine = engines.start()
    one = sequence("one", prompt, hands_over=True)
    engine.engine.submit(one)
    engine.sink.wait(lambda: one in engine.sink.prefilled)
    assert engine.sink.tokens[one] == engines.reference(prompt)[:1]
    assert (one.tail_key, one.num_computed, one.ending) == (None, 20, None)
    engine.wait_at_rest()


def test_one_token_is_never_handed_over(engines: Any, sequence: MakeSequence) -> None:
    engine = engines.start()
    one = sequence("one", [40] * 20, 1, hands_over=True)
    engine.run(one)
    engine.wait_at_rest()
    assert engine.sink.endings[one] == LENGTH
    assert engine.sink.prefilled == []
