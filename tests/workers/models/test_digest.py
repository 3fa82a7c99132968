"""The digest engine: nothing wrong in the pool stays unseen."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.bench.digest_reference import DigestReference
from workers.models.bench import EngineBench
from workers.models.digest import DigestRunner

PROMPT = list(range(100, 180))


@pytest.mark.parametrize("place", [0, 31, 511, 16 * 32 * 4 + 15 * 32 + 31])
def test_one_wrong_bit_anywhere_in_the_context_changes_the_logits(place: int) -> None:
    bench = EngineBench(DigestRunner())
    lane = bench.lane(PROMPT, 3)
    right = bench.catch_up(lane)
    lane.tokens.pop()
    lane.num_computed -= 1
    block_bytes = bench.pool.shape[1]

    bench.pool[lane.block_ids[place // block_bytes], place % block_bytes] ^= 1
    if place >= (len(PROMPT) - 1) * 32:  # the last token's entry is written anew
        assert (bench.catch_up(lane) == right).all()
    else:
        assert (bench.catch_up(lane) != right).any()


def test_bytes_after_the_context_do_not_count() -> None:
    bench = EngineBench(DigestRunner())
    lane = bench.lane(PROMPT[:20], 3)
    right = bench.catch_up(lane)
    lane.tokens.pop()
    lane.num_computed -= 1

    bench.pool[lane.block_ids[1], 20 % 16 * 32 :] = 255

    assert (bench.catch_up(lane) == right).all()


def test_a_swapped_block_table_changes_the_logits() -> None:
    bench = EngineBench(DigestRunner())
    lane = bench.lane(PROMPT, 3)
    right = bench.catch_up(lane)
    lane.tokens.pop()
    lane.num_computed -= 1

    lane.block_ids[1], lane.block_ids[2] = lane.block_ids[2], lane.block_ids[1]

    assert (bench.catch_up(lane) != right).any()


def test_histories_are_not_read() -> None:
    bench = EngineBench(DigestRunner())
    lane = bench.lane(PROMPT, 3)
    bench.step([lane], [79])
    lane.tokens[:79] = [0] * 79

    token = bench.catch_up(lane).argmax()

    fresh = EngineBench(DigestRunner())
    assert fresh.catch_up(fresh.lane(PROMPT)).argmax() == token


def test_only_printable_ascii_is_generated() -> None:
    tokens = EngineBench(DigestRunner()).generate(PROMPT, 200).tokens[len(PROMPT) :]

    assert all(32 <= token < 127 for token in tokens)
    assert len(set(tokens)) > 50


def test_logits_are_finite_exactly_at_printable_ascii() -> None:
    bench = EngineBench(DigestRunner())

    logits = bench.catch_up(bench.lane(PROMPT))

    assert np.flatnonzero(np.isfinite(logits)).tolist() == list(range(32, 127))


def test_a_step_takes_at_least_its_delay() -> None:
    bench = EngineBench(DigestRunner(step_delay_ms=20))
    lane = bench.lane(PROMPT)
    began = time.perf_counter()

    bench.step([lane], [10])

    assert time.perf_counter() - began >= 0.02


def test_it_says_what_its_rule_says_without_blocks_or_batches() -> None:
    bench = EngineBench(DigestRunner())
    lane = bench.lane(PROMPT, 20)
    for _ in range(20):
        bench.catch_up(lane)
    assert lane.tokens[len(PROMPT) :] == DigestReference(PROMPT).answer(20)
