"""Engines over a real cache daemon: hand-over, reuse and faults leave every output as it was."""

# ruff: noqa: S311 - random prompts, no secrets

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.workers.tiered import (
    BLOCK,
    LENGTHS,
    MakePrompt,
    MakeSequence,
    handed_over,
    prefill,
    wait_kvd_at_rest,
)
from tiering.block_hash import BlockHasher, tail_key


@pytest.mark.parametrize("length", LENGTHS)
def test_a_handed_over_sequence_goes_on_without_computing_its_prompt(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt, length: int
) -> None:
    prompt = prompts(random.Random(length), length)
    expected = engines.reference(prompt)
    prefills = engines.start(mover=kvd.mover("prefill"))
    decodes = engines.start(mover=kvd.mover("decode"))
    first = sequence("r", prompt, hands_over=True)
    prefill(prefills, first)
    assert first.num_computed == length
    assert (first.tail_key is None) == (length % BLOCK == 0)
    second = handed_over(sequence, first)

    (rest,) = decodes.run(second)

    assert prefills.sink.tokens[first] + rest == expected
    assert second.num_cached == length
    stats = decodes.engine.stats()
    assert (stats.num_prefill_tokens, stats.num_decode_tokens) == (0, 15)
    if first.tail_key is not None:
        client = kvd.client("observer")
        client.connect()
        assert client.find([first.tail_key]) == 0  # dropped once it was loaded
        client.close()
    prefills.wait_at_rest()
    decodes.wait_at_rest()
    wait_kvd_at_rest(kvd)


def test_many_sequences_handed_over_at_once_equal_the_lone_runs(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    rng = random.Random(1)
    asked = [prompts(rng, rng.randrange(1, 200)) for _ in range(64)]
    expected = [engines.reference(prompt, 40, temperature=0.8, seed=3) for prompt in asked]
    prefills = engines.start(mover=kvd.mover("prefill"), max_batch_tokens=128)
    decodes = [engines.start(mover=kvd.mover("decode")) for _ in range(2)]
    firsts = [
        sequence(f"r{number}", prompt, 40, temperature=0.8, seed=3, hands_over=True)
        for number, prompt in enumerate(asked)
    ]
    prefill(prefills, *firsts)
    seconds = [handed_over(sequence, first, 40) for first in firsts]
    for second in seconds:
        second.sampling = firsts[0].sampling
    for number, second in enumerate(seconds):
        decodes[number % 2].engine.submit(second)
    outputs = []
    for number, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
        sink = decodes[number % 2].sink
        sink.wait_ended(second)
        outputs.append(prefills.sink.tokens[first] + sink.tokens[second])

    assert outputs == expected
    assert sum(each.engine.stats().num_prefill_tokens for each in decodes) == 0
    for each in [prefills, *decodes]:
        each.wait_at_rest()
    wait_kvd_at_rest(kvd)


def test_a_prompt_comes_back_from_kvd_when_hbm_has_forgotten_it(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:  # C108 below HBM
    rng = random.Random(2)
    head = prompts(rng, 48)
    one, other = head + prompts(rng, 20), head + prompts(rng, 20)
    expected = [engines.reference(one), engines.reference(other)]
    engine = engines.start(mover=kvd.mover())
    cached = []
    for number in range(10):
        prompt = one if number % 2 == 0 else other
        each = sequence(f"r{number}", prompt)
        assert engine.run(each) == [expected[number % 2]]
        cached.append(each.num_cached)
        engine.wait_at_rest()  # written through
        engine.forget_cached()
    assert cached == [0, 48] + [64] * 8
    assert engine.engine.stats().mover.num_loaded_blocks == 3 + 8 * 4


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_an_exact_hit_in_kvd_still_computes_one_token(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt, length: int
) -> None:  # C109 below HBM
    prompt = prompts(random.Random(length), length)
    expected = engines.reference(prompt)
    engine = engines.start(mover=kvd.mover())
    for number in range(3):
        again = sequence(f"r{number}", prompt)
        assert engine.run(again) == [expected]
        assert again.num_cached == (0 if number == 0 else (length - 1) // BLOCK * BLOCK)
        engine.wait_at_rest()
        engine.forget_cached()


def test_a_prompt_survives_in_nvme_when_kvd_restarts(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(3), 100)
    expected = engines.reference(prompt)
    first = engines.start(mover=kvd.mover("first"))
    assert first.run(sequence("r1", prompt)) == [expected]
    first.engine.stop(5)
    kvd.end()
    kvd.start()
    second = engines.start(mover=kvd.mover("second"))
    again = sequence("r2", prompt)
    assert second.run(again) == [expected]
    assert again.num_cached == 96


def test_a_tail_is_passed_over_when_the_log_has_grown_past_it(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(4), 37)
    expected = engines.reference(prompt, 40)
    prefills = engines.start(mover=kvd.mover("prefill"))
    decodes = engines.start(mover=kvd.mover("decode"))
    first = sequence("r", prompt, 40, hands_over=True)
    prefill(prefills, first)
    # Another run of the same prompt brings the blocks behind the tail's place to kvd.
    prefills.run(sequence("twin", prompt, 40))
    prefills.wait_at_rest()
    recovered = sequence(  # as many tokens into its last block as the tail held
        "r", prompt, 40, logged=expected[:17], attempt=3, tail_key=first.tail_key
    )
    assert decodes.run(recovered) == [expected[17:]]
    assert recovered.num_cached == 37  # 48, of which the prompt has so many


def test_a_tail_that_is_gone_is_computed_again(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(18), 37)
    prefills = engines.start(mover=kvd.mover("prefill"))
    decodes = engines.start(mover=kvd.mover("decode"))
    first = sequence("r", prompt, hands_over=True)
    prefill(prefills, first)
    client = kvd.client("observer")
    client.connect()
    client.discard([first.tail_key])
    client.close()
    second = handed_over(sequence, first)
    assert decodes.run(second) == [engines.reference(prompt)[1:]]
    assert second.num_cached == 32


def test_a_recovered_sequence_is_handed_over_again(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(5), 37)
    expected = engines.reference(prompt, 40)
    prefills = engines.start(mover=kvd.mover("prefill"))
    decodes = engines.start(mover=kvd.mover("decode"))
    first = sequence("r", prompt, 40, logged=expected[:10], attempt=2, hands_over=True)
    prefill(prefills, first)
    assert first.tokens[37:] == expected[:11]
    second = handed_over(sequence, first, 40)
    assert decodes.run(second) == [expected[11:]]
    assert decodes.engine.stats().num_decode_tokens == 29
    assert decodes.engine.stats().num_prefill_tokens == 0


def test_sequences_preempted_in_a_small_pool_come_back_from_kvd(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    rng = random.Random(6)
    asked = [prompts(rng, rng.randrange(20, 120)) for _ in range(24)]
    expected = [engines.reference(prompt, 100) for prompt in asked]
    engine = engines.start(num_blocks=64, mover=kvd.mover(max_pending_blocks=16))
    sequences = [sequence(f"r{number}", prompt, 100) for number, prompt in enumerate(asked)]

    assert engine.run(*sequences) == expected
    assert engine.engine.stats().num_preemptions > 0
    engine.wait_at_rest()
    wait_kvd_at_rest(kvd)


def test_cancels_at_random_steps_return_every_block_and_lease(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    rng = random.Random(7)
    prefills = engines.start(num_blocks=64, max_batch_tokens=64, mover=kvd.mover("prefill"))
    decodes = engines.start(num_blocks=64, mover=kvd.mover("decode"))
    tails = [prompts(rng, rng.randrange(1, 30)) for _ in range(6)]
    head = prompts(rng, 6 * BLOCK)
    expected = [engines.reference(head + tail, 12) for tail in tails]
    for number in range(200):
        firsts = [
            sequence(f"{number}.{index}", head + tail, 12, hands_over=True)
            for index, tail in enumerate(tails)
        ]
        for first in firsts:
            prefills.engine.submit(first)
        for first in rng.sample(firsts, 2):
            prefills.engine.cancel(first.request_id)
        sink = prefills.sink
        sink.wait(lambda s=sink, f=firsts: all(x in s.prefilled or x in s.endings for x in f))
        seconds = {
            index: handed_over(sequence, first, 12)
            for index, first in enumerate(firsts)
            if first in sink.prefilled
        }
        for second in seconds.values():
            decodes.engine.submit(second)
        doomed = rng.sample(list(seconds.values()), min(2, len(seconds)))
        for second in doomed:
            decodes.engine.cancel(second.request_id)
        decodes.sink.wait_ended(*seconds.values())
        prefills.wait_at_rest()
        decodes.wait_at_rest()
        if number % 3 == 0:
            prefills.forget_cached()
            decodes.forget_cached()
        for index, second in seconds.items():
            got = sink.tokens[firsts[index]] + decodes.sink.tokens[second]
            assert got == expected[index][: len(got)]
            assert second in doomed or len(got) == 12
    wait_kvd_at_rest(kvd)


def num_kvd_slots(kvd: Any) -> int:
    """Slots that hold anything, in both tiers."""
    client = kvd.client("observer")
    client.connect()
    tiers = client.stats().tiers.values()
    client.close()
    return sum(
        num for tier in tiers for state, num in tier.slots_by_state.items() if state != "free"
    )


def test_a_sequence_that_may_leave_no_trace_leaves_none_in_kvd(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    rng = random.Random(13)
    engine = engines.start(mover=kvd.mover())
    engine.run(sequence("private", prompts(rng, 100), uses_cache=False))
    engine.wait_at_rest()
    stats = engine.engine.stats()
    assert (stats.mover.num_stored_blocks, stats.cached_blocks) == (0, 0)
    assert num_kvd_slots(kvd) == 0


def test_a_sequence_that_may_leave_no_trace_is_handed_over_and_its_blocks_are_gone_then(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(13), 100)
    expected = engines.reference(prompt)
    prefills = engines.start(mover=kvd.mover("prefill"))
    decodes = engines.start(mover=kvd.mover("decode"))
    first = sequence("private", prompt, uses_cache=False, hands_over=True)
    prefill(prefills, first)
    keys = BlockHasher(first.key_root).keys(prompt, BLOCK)
    client = kvd.client("observer")
    client.connect()
    assert client.find(keys) == 0, "only its own next worker can find them"
    client.close()
    assert num_kvd_slots(kvd) == 7
    second = handed_over(sequence, first)
    second.sampling = first.sampling

    assert decodes.run(second) == [expected[1:]]
    assert decodes.engine.stats().num_prefill_tokens == 0
    for each in (prefills, decodes):
        each.wait_at_rest()
        assert each.engine.stats().cached_blocks == 0
    assert num_kvd_slots(kvd) == 0


def test_the_tail_that_nobody_fetched_is_known_by_request_and_attempt(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    engine = engines.start(mover=kvd.mover())
    first = sequence("r", prompts(random.Random(16), 20), hands_over=True, attempt=2)
    prefill(engine, first)
    assert first.tail_key == tail_key(first.key_root, "r", 2, 20)
    client = kvd.client("observer")
    client.connect()
    assert client.find([first.tail_key]) == 1
    client.close()
