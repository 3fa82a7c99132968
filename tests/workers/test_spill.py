"""More KV than the HBM pool holds: preempted sequences go to the tiers and come back from there."""

# ruff: noqa: S311 - random prompts, no secrets

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

from workers.models.digest import DigestRunner
from workers.sequence import Sequence

POOL_BLOCKS = 32
MakeSequence = Callable[..., Sequence]
MakePrompt = Callable[[random.Random, int], list[int]]


@pytest.mark.parametrize(
    "options",
    [{}, {"uses_cache": False}, {"prefix_cache": False}],
    ids=["shared", "private", "no_hbm_cache"],
)
def test_sequences_with_four_times_the_pools_kv_are_served_and_nothing_is_computed_twice(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt, options: dict[str, bool]
) -> None:
    rng = random.Random(1)
    asked = [prompts(rng, rng.randrange(40, 90)) for _ in range(16)]
    expected = [engines.reference(prompt, 64) for prompt in asked]
    num_blocks = sum(-(-(len(prompt) + 64) // 16) for prompt in asked)
    assert num_blocks >= 4 * POOL_BLOCKS
    fields = {name: value for name, value in options.items() if name == "uses_cache"}
    settings = {name: value for name, value in options.items() if name == "prefix_cache"}
    engine = engines.start(mover=kvd.mover(), num_blocks=POOL_BLOCKS, **settings)

    got = engine.run(*(sequence(f"r{n}", p, 64, **fields) for n, p in enumerate(asked)))

    assert got == expected
    stats = engine.engine.stats()
    assert 0 < stats.num_spills <= stats.num_preemptions
    # What a step has computed is stored whole, and found again, whoever was preempted.
    num_lost = stats.num_prefill_tokens - sum(len(prompt) for prompt in asked)
    assert 0 <= num_lost < 16 * stats.num_preemptions
    assert stats.num_decode_tokens == 16 * 63
    engine.wait_at_rest()


def test_returning_sessions_with_four_times_the_pools_kv_compute_only_what_is_new(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    rng = random.Random(2)
    engine = engines.start(mover=kvd.mover(), num_blocks=POOL_BLOCKS)
    sessions = [prompts(rng, 160) for _ in range(12)]
    for turn in range(3):
        asked = [sequence(f"{turn}.{n}", list(session)) for n, session in enumerate(sessions)]
        answers = engine.run(*asked)
        engine.wait_at_rest()  # written through
        assert answers == [engines.reference(session) for session in sessions]
        if turn:
            assert [each.num_cached for each in asked] == [
                (len(session) - 8 - 1) // 16 * 16 for session in sessions
            ]
        for session, answer in zip(sessions, answers, strict=True):
            session.extend(answer + prompts(rng, 8))
    assert sum(len(session) // 16 for session in sessions) >= 4 * POOL_BLOCKS


def test_a_sequence_cancelled_while_it_is_spilled_keeps_its_blocks_until_the_mover_lets_go(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    rng = random.Random(3)
    engine = engines.start(runner=DigestRunner(step_delay_ms=1), mover=kvd.mover(), num_blocks=8)
    asked = [sequence(f"r{n}", prompts(rng, 40), 80) for n in range(2)]
    for each in asked:
        engine.engine.submit(each)
    engine.sink.wait(lambda: len(engine.sink.steps) > 3)
    kvd.process.send_signal(signal.SIGSTOP)
    engine.wait_stats(lambda stats: stats.num_spills == 1)
    engine.engine.cancel("r1")
    engine.sink.wait_ended(asked[1])
    held = engine.engine.stats().used_blocks
    assert held == 8, "nothing was given away under the mover's hands"
    kvd.process.send_signal(signal.SIGCONT)
    engine.sink.wait_ended(asked[0])
    assert engine.sink.tokens[asked[0]] == engines.reference(asked[0].tokens[:40], 80)
    engine.wait_at_rest()


def test_a_spill_without_a_daemon_costs_a_recompute(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    rng = random.Random(4)
    asked = [prompts(rng, 60) for _ in range(8)]
    expected = [engines.reference(prompt, 64) for prompt in asked]
    engine = engines.start(mover=kvd.mover(), num_blocks=24, prefix_cache=False)
    kvd.kill()
    assert engine.run(*(sequence(f"r{n}", p, 64) for n, p in enumerate(asked))) == expected
    assert engine.engine.stats().num_spills > 0
    engine.wait_at_rest()
