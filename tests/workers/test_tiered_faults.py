"""Engines over a cache daemon that dies, stalls, fills up or holds wrong bytes: outputs hold."""

# ruff: noqa: S311 - random prompts, no secrets

from __future__ import annotations

import random
import signal
import time
from typing import Any

import pytest

from pipeline.protocol.cache_use import LoadReason
from tests.workers.tiered import (
    BLOCK,
    MakePrompt,
    MakeSequence,
    handed_over,
    prefill,
    wait_kvd_at_rest,
)
from workers.endings import LATE
from workers.models.digest import DigestRunner


@pytest.mark.parametrize("phase", ["loading", "storing"])
def test_blocks_of_a_cancelled_move_stay_held_until_the_mover_has_let_go(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt, phase: str
) -> None:  # sglang PR#35360
    prompt = prompts(random.Random(17), 100)
    engine = engines.start(mover=kvd.mover())
    engine.run(sequence("warm", prompt))
    engine.wait_at_rest()
    engine.forget_cached()
    one = sequence("r", prompt, 40, hands_over=phase == "storing")
    if phase == "storing":
        one.key_root = bytes(32)
        one.tokens[:] = one.tokens[:10]  # nothing to load, a tail to store
        one.num_prompt_tokens = 10
    kvd.process.send_signal(signal.SIGSTOP)
    engine.engine.submit(one)
    engine.wait_stats(lambda stats: getattr(stats, phase) == 1)
    engine.engine.cancel("r")
    engine.sink.wait_ended(one)
    engine.wait_stats(lambda stats: stats.used_blocks > 0 and stats.running == 0)
    kvd.process.send_signal(signal.SIGCONT)
    engine.wait_at_rest()
    assert engine.sink.prefilled == []
    wait_kvd_at_rest(kvd)


def test_a_deadline_is_kept_while_nothing_runs_and_the_tiers_do_not_answer(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:  # vllm#45388: nothing wakes an engine whose sequences all wait
    prompt = prompts(random.Random(19), 100)
    engine = engines.start(mover=kvd.mover())
    engine.run(sequence("warm", list(prompt)))
    engine.wait_at_rest()
    engine.forget_cached()
    kvd.process.send_signal(signal.SIGSTOP)
    late = sequence("late", list(prompt), deadline_s=time.monotonic() + 0.5)
    engine.engine.submit(late)
    engine.sink.wait_ended(late)
    assert engine.sink.endings[late] == LATE
    assert engine.engine.stats().used_blocks > 0, "its load is still under way"
    kvd.process.send_signal(signal.SIGCONT)
    engine.wait_at_rest()


def test_a_killed_kvd_costs_a_recompute_and_nothing_else(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    rng = random.Random(8)
    asked = [prompts(rng, rng.randrange(20, 200)) for _ in range(16)]
    expected = [engines.reference(prompt, 60) for prompt in asked]
    engine = engines.start(runner=DigestRunner(step_delay_ms=1), mover=kvd.mover())
    sequences = [sequence(f"r{number}", prompt, 60) for number, prompt in enumerate(asked)]
    for each in sequences:
        engine.engine.submit(each)
    engine.sink.wait(lambda: len(engine.sink.steps) > 10)
    kvd.kill()
    engine.sink.wait_ended(*sequences)
    assert [engine.sink.tokens[each] for each in sequences] == expected
    engine.wait_at_rest()
    engine.forget_cached()
    again = sequence("again", asked[0], 60)
    assert engine.run(again) == [expected[0]]
    assert again.num_cached == 0


def test_a_kvd_killed_between_the_workers_costs_a_recompute(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(9), 100)
    expected = engines.reference(prompt)
    prefills = engines.start(mover=kvd.mover("prefill"))
    decodes = engines.start(mover=kvd.mover("decode"))
    first = sequence("r", prompt, hands_over=True)
    prefill(prefills, first)
    kvd.kill()
    second = handed_over(sequence, first)
    assert decodes.run(second) == [expected[1:]]
    assert second.num_cached == 0


def test_a_hand_over_goes_through_while_kvd_is_away(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    engine = engines.start(mover=kvd.mover())
    kvd.kill()
    prompt = prompts(random.Random(10), 100)
    first = sequence("r", prompt, hands_over=True)
    prefill(engine, first)
    assert engine.sink.tokens[first] == engines.reference(prompt)[:1]
    engine.wait_at_rest()


def test_the_mover_comes_back_to_a_kvd_that_was_restarted(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    rng = random.Random(11)
    engine = engines.start(mover=kvd.mover())
    kvd.kill()
    engine.run(sequence("away", prompts(rng, 100)))
    kvd.start()
    for number in range(1000):  # each new prompt is an attempt; the back-off ends within 2 s
        engine.run(sequence(f"r{number}", prompts(rng, 100)))
        engine.wait_at_rest()
        if engine.engine.stats().mover.num_stored_blocks:
            break
    assert engine.engine.stats().mover.is_connected


def test_the_first_load_after_a_restart_of_kvd_finds_what_its_disk_has(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(18), 100)
    engine = engines.start(mover=kvd.mover(), prefix_cache=False)
    (expected,) = engine.run(sequence("first", list(prompt)))
    engine.wait_at_rest()
    kvd.end()
    kvd.start()
    again = sequence("again", list(prompt))
    assert engine.run(again) == [expected]
    assert again.num_cached == 96
    assert engine.engine.stats().mover.num_unavailable == 0


@pytest.mark.parametrize("hurt", [0, 2, 5])
def test_a_block_with_wrong_bytes_cuts_the_run_there(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt, hurt: int
) -> None:
    prompt = prompts(random.Random(12), 100)
    expected = engines.reference(prompt)
    engine = engines.start(mover=kvd.mover())
    first = sequence("r1", prompt)
    engine.run(first)
    engine.wait_at_rest()
    engine.forget_cached()
    client = kvd.client("vandal")
    client.connect()
    lease = client.acquire([first.block_keys[hurt]])
    data = client._slab.view(lease.blocks[0].slot)
    data[3] ^= 1
    del data
    client.release(lease)
    client.close()

    again = sequence("r2", prompt)
    assert engine.run(again) == [expected]
    assert again.num_cached == hurt * BLOCK
    assert again.cache_use is not None
    assert again.cache_use.load is LoadReason.REFUSED
    assert again.cache_use.recomputed_tokens == (6 - hurt) * BLOCK
    assert engine.engine.stats().mover.num_truncated_loads == 1


def test_write_through_is_dropped_when_the_mover_is_behind_but_a_hand_over_is_not(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    prompt = prompts(random.Random(14), 100)
    expected = engines.reference(prompt)
    prefills = engines.start(mover=kvd.mover("prefill", max_pending_blocks=0))
    decodes = engines.start(mover=kvd.mover("decode"))
    first = sequence("r", prompt, hands_over=True)
    prefill(prefills, first)
    mover = prefills.engine.stats().mover
    assert (mover.num_dropped_blocks, mover.num_stored_blocks) == (6, 7)
    second = handed_over(sequence, first)
    assert decodes.run(second) == [expected[1:]]
    assert second.num_cached == 100


def test_outputs_hold_when_kvd_is_full_all_the_time(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:  # vllm#54914
    kvd.end()
    kvd.dram_bytes = 16 * 4096
    kvd.start()
    rng = random.Random(15)
    asked = [prompts(rng, rng.randrange(1, 300)) for _ in range(12)]
    expected = [engines.reference(prompt) for prompt in asked]
    engine = engines.start(mover=kvd.mover(), num_blocks=64)
    for number in range(10):
        sequences = [sequence(f"{number}.{index}", prompt) for index, prompt in enumerate(asked)]
        assert engine.run(*sequences) == expected
    engine.wait_at_rest()
    wait_kvd_at_rest(kvd)
