"""Real attention over a context of four HBM pools: the same tokens as with a pool that holds all."""

# ruff: noqa: S311 - random prompts, no secrets

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.protocol.tokens import TokenRecord
from workers.models.torch_runner import TorchRunner

POOL_BLOCKS = 7
NUM_TOKENS = 100
CHUNK_TOKENS = 48

MakeModel = Callable[[str], Path]
MODELS = [("llama", "float32"), ("llama", "auto"), ("mistral", "auto"), ("gemma3", "float32")]


@pytest.fixture(params=MODELS, ids=["reference", "native", "sliding-window", "modules"])
def make_runner(request: pytest.FixtureRequest, tiny_model: MakeModel) -> Callable[[], TorchRunner]:
    """The same model anew: a runner has one pool."""
    name, dtype = request.param
    return lambda: TorchRunner(tiny_model(name), dtype=dtype)


def records_of(engine: Any, sequence: Any) -> list[TokenRecord]:
    outputs = [output for step in engine.sink.steps for output in step]
    return [each.record for each in outputs if each.sequence is sequence and each.record]


def test_tokens_and_scores_are_those_of_a_pool_that_holds_all(
    engines: Any, kvd: Any, sequence: Any, make_runner: Callable[[], TorchRunner]
) -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(3, 300) for _ in range(4 * POOL_BLOCKS * 16 - NUM_TOKENS)]
    options = {"ignore_eos": True, "num_logprobs": 2}
    runner = make_runner()
    kvd.block_bytes = runner.spec.layout.block_bytes
    whole = engines.start(runner=make_runner(), max_batch_tokens=CHUNK_TOKENS)
    small = engines.start(
        runner=runner, mover=kvd.mover(), num_blocks=POOL_BLOCKS, max_batch_tokens=CHUNK_TOKENS
    )
    asked = [sequence(f"r{n}", list(prompt), NUM_TOKENS, **options) for n in range(3)]
    whole.run(asked[0])

    small.run(asked[1])
    small.wait_at_rest()
    small.run(asked[2])  # of its prompt nothing is computed but the last token

    # Native sums have one order; in float32 a row's depends on who shares its step.
    tolerance = 0.0 if runner.operators.batch_invariant else 1e-4
    expected = records_of(whole, asked[0])
    assert len(expected) == NUM_TOKENS
    for each in asked[1:]:
        got = records_of(small, each)
        assert [record.token_id for record in got] == [record.token_id for record in expected]
        for one, other in zip(got, expected, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=tolerance)
    assert asked[2].num_cached == (len(prompt) - 1) // 16 * 16
