"""Guessed tokens: the same output as without, in fewer steps, at nobody else's cost."""

# ruff: noqa: S311 - random prompts, no secrets

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipeline.protocol.tokens import TokenRecord
from workers.model import Float32Array, StepBatch
from workers.models.digest import DigestRunner
from workers.prompt_lookup import PromptLookup
from workers.sequence import Sequence

MakeSequence = Callable[..., Sequence]
MakePrompt = Callable[[random.Random, int], list[int]]
SPACE, BANG, QUOTE = 32, 33, 34


class CoinRunner(DigestRunner):
    """The digest engine with three words: what was said before is often said again, but not always.

    A guess that was kept wrongly, or read a wrong entry, changes all that follows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def forward(self, batch: StepBatch) -> Float32Array:
        self.num_steps += 1
        logits = super().forward(batch)
        logits[:, QUOTE + 1 :] = -np.inf
        logits[:, SPACE] += 2.5
        return logits


def records_of(engine: Any, sequence: Sequence) -> list[TokenRecord]:
    outputs = [o for step in engine.sink.steps for o in step if o.sequence is sequence]
    return [output.record for output in outputs if output.record is not None]


def run_both(engines: Any, make: Callable[[], list[Sequence]], **settings: Any) -> tuple[Any, Any]:
    """The same sequences without and with guesses; both engines, whose outputs are equal."""
    plain, guessing = (
        engines.start(runner=CoinRunner(), speculation_tokens=count, **settings) for count in (0, 6)
    )
    one, other = make(), make()
    assert guessing.run(*other) == plain.run(*one)
    for first, second in zip(one, other, strict=True):
        assert records_of(plain, first) == records_of(guessing, second)
        assert plain.sink.endings[first] == guessing.sink.endings[second]
    for engine in (plain, guessing):
        engine.wait_at_rest()
    return plain.engine.stats(), guessing.engine.stats()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "num_logprobs": 3},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.0, "stop_token_ids": (QUOTE,)},
    ],
    ids=["greedy", "logprobs", "seeded", "stopped"],
)
@pytest.mark.parametrize("num_sequences", [1, 5])
def test_the_output_is_the_same_in_fewer_steps(
    engines: Any,
    sequence: MakeSequence,
    prompts: MakePrompt,
    fields: dict[str, Any],
    num_sequences: int,
) -> None:
    def make() -> list[Sequence]:
        rng = random.Random(num_sequences)
        return [
            sequence(f"r{rank}", prompts(rng, rng.randrange(1, 90)), 200, **fields)
            for rank in range(num_sequences)
        ]

    plain, guessing = run_both(engines, make)

    assert plain.num_drafts == 0
    assert guessing.num_drafts > guessing.num_drafts_held >= 0
    if "stop_token_ids" not in fields:
        assert guessing.num_drafts_held > 0
        assert guessing.num_steps < plain.num_steps
        assert guessing.num_decode_tokens == plain.num_decode_tokens


def test_the_same_up_to_the_very_end_of_the_context(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    def make() -> list[Sequence]:
        rng = random.Random(0)
        return [sequence(f"r{n}", prompts(rng, 480 - n), 100) for n in range(8)]

    run_both(engines, make)


def test_the_same_in_a_pool_that_preempts(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    def make() -> list[Sequence]:
        rng = random.Random(1)
        return [sequence(f"r{n}", prompts(rng, rng.randrange(9, 90)), 120) for n in range(12)]

    plain, guessing = run_both(engines, make, num_blocks=40)

    assert plain.num_preemptions > 0
    assert guessing.num_drafts_held > 0


def test_the_same_from_cache_and_after_a_hand_over(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(2), 70)
    plain = engines.start(runner=CoinRunner())
    (expected,) = plain.run(sequence("r", prompt, 150))
    guessing = engines.start(
        runner=CoinRunner(), mover=kvd.mover(), speculation_tokens=6, block_tokens=16
    )
    assert guessing.run(sequence("r", prompt, 150)) == [expected]
    longer = [*prompt, *expected]
    (after,) = plain.run(sequence("next", longer, 40))
    turn = sequence("next", longer, 40)
    assert guessing.run(turn) == [after]
    assert turn.num_cached > len(prompt), "blocks with guessed tokens are as good as others"
    guessing.forget_cached()
    assert guessing.run(sequence("next", longer, 40)) == [after]
    again = sequence("r", prompt, 150, logged=expected[:60], attempt=2)
    assert guessing.run(again) == [expected[60:]]


def test_a_stop_string_within_guesses_ends_the_output(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    class StopAtThird:
        def __init__(self) -> None:
            self.num_seen = 0

        def feed(self, token_id: int) -> bool:
            self.num_seen += token_id == BANG
            return self.num_seen == 9

    def make() -> list[Sequence]:
        return [sequence("r", prompts(random.Random(3), 40), 300)]

    run_both(engines, make, stop_matcher=lambda _: StopAtThird())


def test_a_request_that_changes_logits_is_not_guessed(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    def make() -> list[Sequence]:
        return [sequence("r", prompts(random.Random(4), 40), 60, frequency_penalty=0.1)]

    _, guessing = run_both(engines, make)

    assert guessing.num_drafts == 0


def test_what_followed_the_longest_match_last_is_guessed() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 3, 4, 5, 6, 7, 2, 3, 8, 1, 2, 3]
    lookup = PromptLookup(tokens, max_drafts=4, context_tokens=100)
    assert lookup.propose(9) == (4, 5, 6, 7)
    assert lookup.propose(2) == (4, 5)
    tokens.append(50)
    assert lookup.propose(4) == ()
    tokens += [2, 3]
    assert lookup.propose(1) == (50,)


def test_guesses_stay_within_the_context() -> None:
    tokens = [1, 2, 1, 2, 1, 2]
    assert PromptLookup(tokens, max_drafts=4, context_tokens=7).propose(4) == (1,)
    assert PromptLookup(tokens, max_drafts=4, context_tokens=6).propose(4) == ()
    assert PromptLookup([1], max_drafts=4, context_tokens=60).propose(4) == ()


def test_guesses_that_fail_get_shorter_and_rest() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2]
    lookup = PromptLookup(tokens, max_drafts=4, context_tokens=100)
    assert lookup.propose(9) == (3, 4, 5, 6)
    lookup.learn(4, 2)
    assert lookup.propose(9) == (3, 4)
    lookup.learn(2, 2)
    assert lookup.propose(9) == (3, 4, 5, 6)
    lookup.learn(4, 0)
    assert lookup.propose(9) == (3,)
    lookup.learn(1, 0)
    assert [lookup.propose(9) for _ in range(5)] == [(), (), (), (), (3,)]
