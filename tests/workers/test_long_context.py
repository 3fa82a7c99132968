"""One context with four times the KV of the HBM pool: served whole, with most of it in kvd's DRAM."""

# ruff: noqa: S311 - random prompts, no secrets

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from pipeline.protocol.failure import Ending, FailureCode
from tests.workers.tiered import BLOCK, LENGTH, MakePrompt, MakeSequence, handed_over
from workers.sequence import Sequence

POOL_BLOCKS = 8
LIMIT_S = 30.0


@pytest.mark.parametrize(
    "options",
    [{}, {"uses_cache": False}, {"prefix_cache": False}],
    ids=["shared", "private", "no_hbm_cache"],
)
def test_a_context_of_four_pools_equals_the_same_in_a_pool_that_holds_all(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt, options: dict[str, bool]
) -> None:
    prompt = prompts(random.Random(1), 300)
    expected = engines.reference(prompt, 212)
    assert len(prompt) + len(expected) == 4 * POOL_BLOCKS * BLOCK
    fields = {name: value for name, value in options.items() if name == "uses_cache"}
    settings = {name: value for name, value in options.items() if name == "prefix_cache"}
    engine = engines.start(
        mover=kvd.mover(), num_blocks=POOL_BLOCKS, max_batch_tokens=48, **settings
    )
    coldest: list[int] = []
    engine.sink.on_token = lambda _: coldest.append(engine.engine.stats().cold_blocks)
    asked = sequence("long", prompt, 212, **fields)

    assert engine.run(asked) == [expected]

    assert engine.sink.endings[asked] == LENGTH
    assert max(coldest) > 2 * POOL_BLOCKS
    stats = engine.engine.stats()
    assert (stats.num_prefill_tokens, stats.num_decode_tokens) == (300, 211), "nothing twice"
    engine.wait_at_rest()
    kvd.wait_no_leases()


def test_a_long_prompt_that_comes_again_is_read_where_it_lies(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(2), 400)
    expected = engines.reference(prompt, 40)
    engine = engines.start(mover=kvd.mover(), num_blocks=POOL_BLOCKS)
    assert engine.run(sequence("first", list(prompt), 40)) == [expected]
    engine.wait_at_rest()
    again = sequence("again", list(prompt), 40)

    assert engine.run(again) == [expected]

    assert again.num_cached == 384
    assert again.cache_use is not None
    assert again.cache_use.dram_tokens == 384
    assert engine.engine.stats().mover.num_loaded_blocks == 24


@pytest.mark.parametrize("length", [300, 304])
def test_a_long_context_is_handed_over_whole(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt, length: int
) -> None:
    prompt = prompts(random.Random(length), length)
    expected = engines.reference(prompt, 100)
    prefills = engines.start(mover=kvd.mover("prefill"), num_blocks=POOL_BLOCKS)
    decodes = engines.start(mover=kvd.mover("decode"), num_blocks=POOL_BLOCKS)
    first = sequence("r", prompt, 100, hands_over=True)
    prefills.engine.submit(first)
    prefills.sink.wait(lambda: first in prefills.sink.prefilled)
    prefills.wait_at_rest()
    second = handed_over(sequence, first, 100)

    (rest,) = decodes.run(second)

    assert prefills.sink.tokens[first] + rest == expected
    assert decodes.engine.stats().num_prefill_tokens == 0, "nothing was computed again"
    decodes.wait_at_rest()
    kvd.wait_no_leases()


def test_a_private_long_context_is_handed_over_even_if_its_blocks_have_run_out(
    engines: Any,
    kvd: Any,
    sequence: MakeSequence,
    prompts: MakePrompt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is stored for a minute must not be missed after a prefill of two."""
    prompt = prompts(random.Random(3), 300)
    expected = engines.reference(prompt, 40)
    prefills = engines.start(mover=kvd.mover("prefill"), num_blocks=POOL_BLOCKS)
    decodes = engines.start(mover=kvd.mover("decode"), num_blocks=POOL_BLOCKS)
    first = sequence("r", prompt, 40, hands_over=True, uses_cache=False)

    def wait_run_out(done: Sequence) -> None:
        client = kvd.client("observer")
        client.connect()
        limit_s = time.monotonic() + LIMIT_S
        assert len(done.block_keys) > 2 * POOL_BLOCKS
        while client.find(done.block_keys):
            assert time.monotonic() < limit_s
        client.close()
        monkeypatch.undo()

    monkeypatch.setattr("workers.kv_mover.TRANSIENT_LIFETIME_S", 0.05)
    prefills.sink.on_token = wait_run_out  # before it is handed over
    prefills.engine.submit(first)
    prefills.sink.wait(lambda: first in prefills.sink.prefilled)
    second = handed_over(sequence, first, 40, uses_cache=False)

    (rest,) = decodes.run(second)

    assert prefills.sink.tokens[first] + rest == expected
    assert decodes.engine.stats().num_prefill_tokens == 0
    for each in (prefills, decodes):
        each.wait_at_rest()
        assert each.engine.stats().cached_blocks == 0
    kvd.wait_no_leases()


def test_an_answer_that_outgrows_the_pool_goes_on(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(4), 20)
    expected = engines.reference(prompt, 400)
    engine = engines.start(mover=kvd.mover(), num_blocks=POOL_BLOCKS)
    assert engine.run(sequence("grows", prompt, 400)) == [expected]
    stats = engine.engine.stats()
    assert stats.num_preemptions == 1, "once, to come back as a long one"
    assert stats.num_prefill_tokens == 20
    engine.wait_at_rest()
    kvd.wait_no_leases()


@pytest.mark.parametrize("num_blocks", [2, 3, 5])
def test_the_smallest_pool_will_do(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt, num_blocks: int
) -> None:
    prompt = prompts(random.Random(num_blocks), 150)
    expected = engines.reference(prompt, 40)
    engine = engines.start(mover=kvd.mover(), num_blocks=num_blocks)
    assert engine.run(sequence("long", prompt, 40)) == [expected]
    engine.wait_at_rest()


def test_others_run_beside_a_long_context_and_other_long_ones_wait_for_it(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    rng = random.Random(5)
    long = [prompts(rng, 300) for _ in range(3)]
    short = [prompts(rng, rng.randrange(10, 40)) for _ in range(12)]
    expected = [engines.reference(prompt, 24) for prompt in long + short]
    engine = engines.start(mover=kvd.mover(), num_blocks=16, max_batch_tokens=32)
    asked = [sequence(f"r{n}", prompt, 24) for n, prompt in enumerate(long + short)]

    assert engine.run(*asked) == expected

    ended = list(engine.sink.endings)
    assert ended.index(asked[3]) < ended.index(asked[1]), "a short one passed a long one that waits"
    engine.wait_at_rest()
    kvd.wait_no_leases()


def test_long_ones_that_wait_for_one_another_take_no_place_in_the_line(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt, paced_runner: Any
) -> None:
    rng = random.Random(12)
    engine = engines.start(
        runner=paced_runner, mover=kvd.mover(), num_blocks=POOL_BLOCKS, max_batch_tokens=32
    )
    asked = [sequence(f"r{n}", prompts(rng, 300), 4) for n in range(4)]
    for each in asked:
        engine.engine.submit(each)
    paced_runner.leave.release(4)  # of the ten steps that the first one needs
    engine.sink.wait(lambda: set(asked) <= set(engine.sink.admitted))
    assert engine.engine.stats().num_finished == 0
    paced_runner.leave.release(1000)
    engine.sink.wait_ended(*asked)
    assert all(len(engine.sink.tokens[each]) == 4 for each in asked)


def test_drafts_of_short_sequences_do_not_disturb_a_long_one(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    rng = random.Random(6)
    asked = [prompts(rng, 200), prompts(rng, 20) * 3]
    expected = [engines.reference(prompt, 60) for prompt in asked]
    engine = engines.start(mover=kvd.mover(), num_blocks=12, speculation_tokens=4)
    assert engine.run(*(sequence(f"r{n}", p, 60) for n, p in enumerate(asked))) == expected


def test_a_cancelled_long_context_gives_its_leases_back_at_once(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt, paced_runner: Any
) -> None:
    rng = random.Random(7)
    engine = engines.start(
        runner=paced_runner, mover=kvd.mover(), num_blocks=POOL_BLOCKS, max_batch_tokens=32
    )
    num_cold = 0
    for number in range(30):
        while paced_runner.leave.acquire(blocking=False):
            pass
        num_steps = rng.randrange(1, 20)
        wanted = engine.engine.stats().num_steps + num_steps
        asked = sequence(f"r{number}", prompts(rng, 400), 60)
        engine.engine.submit(asked)
        paced_runner.leave.release(num_steps)
        engine.wait_stats(lambda stats, wanted=wanted: stats.num_steps >= wanted)
        num_cold = max(num_cold, engine.engine.stats().cold_blocks)
        engine.engine.cancel(f"r{number}")
        paced_runner.leave.release(1)  # for the step that it may be in
        engine.sink.wait_ended(asked)
        engine.wait_at_rest()
        kvd.wait_no_leases()
    assert num_cold > 2 * POOL_BLOCKS


def test_a_context_longer_than_the_share_of_dram_is_refused_before_it_is_computed(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    kvd.end()
    kvd.dram_bytes = 60 * 4096  # half of it are 30 blocks
    kvd.start()
    rng = random.Random(8)
    fits, longer = prompts(rng, 30 * BLOCK - 1), prompts(rng, 30 * BLOCK)
    expected = engines.reference(fits, 1)
    engine = engines.start(mover=kvd.mover(), num_blocks=POOL_BLOCKS)
    # The mover's thread tells the limit once it is connected.
    assert engine.run(sequence("fits", fits, 1)) == [expected]
    before = engine.engine.stats().num_prefill_tokens
    asked = sequence("longer", longer, 2)
    engine.run(asked)
    assert engine.sink.endings[asked] == Ending(failure=FailureCode.CONTEXT_EXCEEDED)
    assert engine.engine.stats().num_prefill_tokens == before
