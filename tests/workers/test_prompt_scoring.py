"""Scores of a prompt: complete, exact, told once, whatever was cached or cut off."""

# ruff: noqa: S311 - random prompts, no secrets

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipeline.protocol.failure import Ending, FinishReason
from pipeline.protocol.tokens import TokenRecord
from workers.models.bench import EngineBench
from workers.models.digest import DigestRunner
from workers.sampling import LEAST_LOGPROB
from workers.sequence import Sequence

LENGTH = Ending(reason=FinishReason.LENGTH)
MakeSequence = Callable[..., Sequence]
MakePrompt = Callable[[random.Random, int], list[int]]


def reference(prompt: list[int]) -> list[float]:
    """Log-probability of each token but the first: one forward pass for every prefix."""
    logprobs = []
    bench = EngineBench(DigestRunner(), num_blocks=len(prompt) * (1 + len(prompt) // 16))
    for place in range(1, len(prompt)):
        lane = bench.lane(prompt[:place])
        logits = bench.step([lane], [place])[0].astype(np.float64)
        peak = logits.max()
        logprobs.append(float(logits[prompt[place]] - peak - np.log(np.exp(logits - peak).sum())))
    return logprobs


def scores_of(engine: Any, sequence: Sequence) -> list[TokenRecord]:
    """What was told of the sequence's prompt: exactly once, with its first output."""
    told = [
        (output.prompt_records, rank)
        for step in engine.sink.steps
        for rank, output in enumerate([each for each in step if each.sequence is sequence])
        if output.prompt_records is not None
    ]
    assert len(told) == 1
    assert told[0][1] == 0
    return list(told[0][0])


def check(engine: Any, sequence: Sequence) -> None:
    prompt = sequence.tokens[: sequence.num_prompt_tokens]
    records = scores_of(engine, sequence)
    assert [record.token_id for record in records] == prompt[1:]
    assert [record.logprob for record in records] == pytest.approx(reference(prompt), abs=1e-5)
    for record in records:
        assert len(record.top) == sequence.sampling.num_logprobs
        if record.top:
            assert record.logprob is not None
            assert record.top[0][1] >= record.logprob


def scored(sequence: MakeSequence, name: str, prompt: list[int], **fields: Any) -> Sequence:
    return sequence(name, prompt, **({"echo": True, "num_logprobs": 1} | fields))


@pytest.mark.parametrize("length", [1, 2, 16, 17, 140])
def test_a_prompt_is_scored_with_no_or_some_tokens_after_it(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt, length: int
) -> None:
    prompt = prompts(random.Random(length), length)
    engine = engines.start()
    only = scored(sequence, "only", prompt, max_tokens=0)
    more = scored(sequence, "more", prompt, max_tokens=5, num_logprobs=3)

    assert engine.run(only, more) == [[], engines.reference(prompt, 5)]

    assert engine.sink.endings == {only: LENGTH, more: LENGTH}
    check(engine, only)
    check(engine, more)
    engine.wait_at_rest()


def test_a_cached_prefix_is_scored_all_the_same(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(1), 100)
    engine = engines.start(mover=kvd.mover())
    plain = sequence("plain", prompt, 4)
    engine.run(plain)
    first = scored(sequence, "first", prompt, max_tokens=0)
    engine.run(first)
    engine.forget_cached()
    second = scored(sequence, "second", prompt, max_tokens=2)
    (tokens,) = engine.run(second)
    after = sequence("after", prompt, 4)

    assert engine.run(after) == [engine.sink.tokens[plain]]

    assert tokens == engine.sink.tokens[plain][:2]
    check(engine, first)
    check(engine, second)
    assert (first.num_cached, second.num_cached, after.num_cached) == (0, 0, 96)
    engine.wait_at_rest()


def test_scored_prompts_in_a_small_pool_among_others(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    rng = random.Random(2)
    asked = [prompts(rng, rng.randrange(20, 120)) for _ in range(16)]
    engine = engines.start(num_blocks=48, max_batch_tokens=96)
    sequences = [
        scored(sequence, f"r{rank}", prompt, max_tokens=60)
        if rank % 2
        else sequence(f"r{rank}", prompt, 60)
        for rank, prompt in enumerate(asked)
    ]

    outputs = engine.run(*sequences)

    assert outputs == [engines.reference(prompt, 60) for prompt in asked]
    assert engine.engine.stats().num_preemptions > 0
    for each in sequences[1::2]:
        check(engine, each)
    engine.wait_at_rest()


def test_a_full_context_is_scored_and_ends(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    engine = engines.start()
    full = scored(sequence, "full", prompts(random.Random(3), 512), max_tokens=0)
    assert engine.run(full) == [[]]
    assert engine.sink.endings[full] == LENGTH
    assert len(scores_of(engine, full)) == 511


def test_a_recovered_sequence_with_logged_tokens_scores_no_more(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(4), 40)
    expected = engines.reference(prompt, 8)
    engine = engines.start()
    late = scored(sequence, "late", prompt, max_tokens=8, logged=expected[:1], attempt=2)
    assert engine.run(late) == [expected[1:]]
    assert all(output.prompt_records is None for step in engine.sink.steps for output in step)


def test_a_handed_over_prompt_is_scored_before_its_first_token_is_told(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(5), 50)
    engine = engines.start(mover=kvd.mover())
    first = scored(sequence, "first", prompt, max_tokens=8, hands_over=True)
    only = scored(sequence, "only", prompt, max_tokens=0, hands_over=True)
    for each in (first, only):
        engine.engine.submit(each)
    engine.sink.wait(lambda: first in engine.sink.prefilled and only in engine.sink.endings)
    assert engine.sink.prefilled == [first]
    check(engine, first)
    check(engine, only)


def test_a_cancelled_prompt_tells_no_scores(
    engines: Any, paced_runner: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    paced_runner.leave.release()
    engine = engines.start(runner=paced_runner)
    long = scored(sequence, "long", prompts(random.Random(6), 300), max_tokens=0)
    engine.engine.submit(long)
    engine.sink.wait(lambda: long in engine.sink.admitted)
    engine.engine.cancel("long")
    paced_runner.leave.release(9)
    engine.sink.wait_ended(long)
    assert engine.sink.endings[long].reason is FinishReason.CANCELLED
    assert [o.prompt_records for step in engine.sink.steps for o in step] == [None]


def test_an_impossible_token_has_the_least_log_probability(
    engines: Any, sequence: MakeSequence
) -> None:
    engine = engines.start()
    odd = scored(sequence, "odd", [65, 7, 66], max_tokens=0)
    engine.run(odd)
    assert scores_of(engine, odd)[0].logprob == LEAST_LOGPROB


def test_a_prompt_longer_than_the_pool_is_scored_whole(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(12), 120)
    engine = engines.start(mover=kvd.mover(), num_blocks=4)
    for name in ("first", "again"):
        asked = sequence(name, list(prompt), 2, echo=True, num_logprobs=1)
        assert engine.run(asked) == [engines.reference(prompt, 2)]
        check(engine, asked)
    engine.wait_at_rest()
