"""A seed's tokens are the same alone, among others, from cache, after a preemption or a hand-over."""

# ruff: noqa: S311 - random prompts, no secrets

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from workers.sequence import Sequence

MakeSequence = Callable[..., Sequence]
MakePrompt = Callable[[random.Random, int], list[int]]
NUM_TOKENS = 24
SPACE = 32
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "top_k": {"temperature": 1.3, "top_k": 8},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "repetition": {"temperature": 0.9, "repetition_penalty": 1.3},
    "penalties": {"temperature": 0.8, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 2.0},
    "bans": {"temperature": 1.0, "bad_words": ((40,), (50, 51), (65, 66, 67)), "min_tokens": 9},
    "bias": {"temperature": 1.0, "logit_bias": ((SPACE, 4.0), (48, -100.0))},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_tokens_of_a_seed_do_not_depend_on_where_it_runs(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt, name: str
) -> None:
    rng = random.Random(name)
    prompt, others = prompts(rng, 75), [prompts(rng, rng.randrange(5, 90)) for _ in range(12)]
    fields = OPTIONS[name] | {"seed": rng.randrange(2**63)}
    expected = engines.reference(prompt, NUM_TOKENS, **fields)

    def asked(**more: Any) -> Sequence:
        return sequence("asked", prompt, NUM_TOKENS, **fields, **more)

    def mates() -> list[Sequence]:
        return [
            sequence(f"m{rank}", other, 40, **OPTIONS[kind] | {"seed": rank})
            for rank, (other, kind) in enumerate(zip(others, [*OPTIONS, *OPTIONS], strict=False))
        ]

    roomy = engines.start(mover=kvd.mover("roomy"))
    assert roomy.run(asked(), *mates())[0] == expected, "among batch mates"
    assert roomy.run(asked())[0] == expected, "from cache"

    tight = engines.start(num_blocks=24)
    assert tight.run(asked(), *mates())[0] == expected, "in a pool that preempts"
    assert tight.engine.stats().num_preemptions > 0

    first = asked(hands_over=True)
    roomy.engine.submit(first)
    roomy.sink.wait(lambda: first in roomy.sink.prefilled)
    assert roomy.sink.tokens[first] == expected[:1]
    after = engines.start(mover=kvd.mover("after"))
    second = asked(logged=expected[:1], attempt=2, tail_key=first.tail_key)
    assert after.run(second) == [expected[1:]], "handed over"
    for num_logged in (2, 7, NUM_TOKENS - 1):
        again = asked(logged=expected[:num_logged], attempt=3)
        assert engines.start().run(again) == [expected[num_logged:]], "after a restart"


def test_different_seeds_differ(engines: Any, sequence: MakeSequence, prompts: MakePrompt) -> None:
    prompt = prompts(random.Random(0), 20)
    asked = [sequence(f"r{seed}", prompt, temperature=1.0, seed=seed) for seed in range(8)]
    assert len({tuple(tokens) for tokens in engines.start().run(*asked)}) == 8


def test_a_penalised_greedy_output_repeats_no_token(
    engines: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(1), 20)
    asked = sequence("r", prompt, 90, presence_penalty=50.0)
    (tokens,) = engines.start().run(asked)
    assert len(set(tokens)) == 90
