"""With native operators a request gives the same bytes, logits and KV, however it is run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.workers.models.tiny_models import TINY_NAMES
from workers.model import Float32Array
from workers.models.bench import EngineBench, Lane
from workers.models.load import load_runner
from workers.models.torch_runner import TorchRunner

PROMPT = [5, 77, 130, 9, 250, 31, 8] * 20
NUM_TOKENS = 6
MakeModel = Callable[[str], Path]


@pytest.fixture(params=TINY_NAMES)
def runner(request: pytest.FixtureRequest, tiny_model: MakeModel) -> TorchRunner:
    engine = load_runner("torch", tiny_model(request.param), dtype="auto")
    if not isinstance(engine, TorchRunner) or not engine.operators.batch_invariant:
        pytest.skip("this machine has no native operators")
    return engine


def generate(bench: EngineBench, lane: Lane, chunk_tokens: int = 1000) -> list[Float32Array]:
    """The logits of each of NUM_TOKENS greedy steps."""
    return [bench.catch_up(lane, chunk_tokens).copy() for _ in range(NUM_TOKENS)]


def kv_bytes(bench: EngineBench, lane: Lane) -> bytes:
    """KV of all computed tokens, block by block."""
    layout = bench.runner.spec.layout
    num_full = lane.num_computed // layout.block_tokens
    return bench.pool[lane.block_ids[:num_full]].tobytes()


def assert_same(one: list[Float32Array], other: list[Float32Array]) -> None:
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left, right)


def test_in_chunks_of_any_size(runner: TorchRunner) -> None:
    bench = EngineBench(runner)
    lane = bench.lane(PROMPT, NUM_TOKENS)
    whole = generate(bench, lane)
    whole_kv = kv_bytes(bench, lane)

    for chunk_tokens in (1, 7, 48, len(PROMPT) - 1):
        other = EngineBench(runner, seed=chunk_tokens)
        chunked = other.lane(PROMPT, NUM_TOKENS)
        assert_same(generate(other, chunked, chunk_tokens), whole)
        assert kv_bytes(other, chunked) == whole_kv


def test_alone_and_in_a_batch(runner: TorchRunner) -> None:
    alone = EngineBench(runner)
    expected = generate(alone, alone.lane(PROMPT, NUM_TOKENS))
    bench = EngineBench(runner, seed=7)
    lanes = [bench.lane(prompt, 60) for prompt in (PROMPT[:30], PROMPT, PROMPT[3:90])]
    results = []

    bench.step(lanes[:1], [11])
    for _ in range(NUM_TOKENS):
        counts = [min(len(lane.tokens) - lane.num_computed, 140) for lane in lanes]
        logits = bench.step(lanes, counts).copy()
        results.append(logits[1])
        for lane, row in zip(lanes, logits, strict=True):
            lane.tokens.append(int(row.argmax()))

    assert_same(results, expected)


def test_with_restored_blocks_and_recomputed_tokens(runner: TorchRunner) -> None:
    source = EngineBench(runner, seed=2)
    computed = source.lane(PROMPT, NUM_TOKENS)
    expected = generate(source, computed)
    other = EngineBench(runner, seed=3)
    restored = other.lane(PROMPT, NUM_TOKENS)
    restored.tokens = computed.tokens[:-1]  # all but the last were logged before a kill
    restored.num_computed = 64
    for theirs, own in zip(computed.block_ids[:4], restored.block_ids[:4], strict=True):
        other.pool[own] = source.pool[theirs]

    last = other.catch_up(restored)  # one chunk over the end of the prompt

    np.testing.assert_array_equal(last, expected[-1])


def test_with_logits_of_the_last_row_or_of_all(runner: TorchRunner) -> None:
    bench = EngineBench(runner)
    every = bench.step_all(bench.lane(PROMPT), len(PROMPT)).copy()

    last = EngineBench(runner, seed=4)
    alone = last.step([last.lane(PROMPT)], [len(PROMPT)])

    np.testing.assert_array_equal(alone[0], every[-1])
