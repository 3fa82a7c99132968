"""More KV than the HBM pool holds: preempted sequences go to the tiers and come back from there."""

# ruff: noqa: S311 - random prompts, no secrets

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import Any

import pytest

from workers.model import Float32Array, StepBatch
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


class StoppingRunner(DigestRunner):
    """The digest engine that freezes the cache daemon right before its first step."""

    def __init__(self, kvd: Any) -> None:
        super().__init__()
        self._kvd = kvd
        self._is_armed = True

    def forward(self, batch: StepBatch) -> Float32Array:
        if self._is_armed and self._kvd.process is not None:
            self._is_armed = False
            self._kvd.process.send_signal(signal.SIGSTOP)
        return super().forward(batch)


def test_blocks_on_their_way_out_are_not_given_to_the_next_sequence(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    rng = random.Random(5)
    first, second = prompts(rng, 100), prompts(rng, 100)
    expected = [engines.reference(prompt, 8) for prompt in (first, second)]
    engine = engines.start(
        runner=StoppingRunner(kvd), mover=kvd.mover(), num_blocks=12, prefix_cache=False
    )
    assert engine.run(sequence("first", list(first), 8)) == [expected[0]]
    assert engine.engine.stats().used_blocks == 6, "its full blocks are still to be written"
    next_one = sequence("second", list(second), 8)
    engine.engine.submit(next_one)
    engine.wait_stats(lambda stats: stats.waiting == 1)
    kvd.process.send_signal(signal.SIGCONT)
    engine.sink.wait_ended(next_one)
    assert engine.sink.tokens[next_one] == expected[1]
    engine.wait_at_rest()

    other = engines.start(mover=kvd.mover("other"))
    again = sequence("again", list(first), 8)
    assert other.run(again) == [expected[0]]
    assert again.num_cached == 96, "what was written is what was computed"


def test_loads_that_hold_the_whole_pool_do_not_hold_up_each_other(
    engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt
) -> None:
    """Fault 30 of the notes (vllm#45388): parked loads must not hold what the next one needs."""
    rng = random.Random(6)
    asked = [prompts(rng, 100) for _ in range(6)]
    expected = [engines.reference(prompt, 20) for prompt in asked]
    first = engines.start(mover=kvd.mover("first"))
    first.run(*(sequence(f"w{n}", list(prompt), 20) for n, prompt in enumerate(asked)))
    first.wait_at_rest()
    engine = engines.start(mover=kvd.mover(), num_blocks=18)
    kvd.process.send_signal(signal.SIGSTOP)
    again = [sequence(f"r{n}", list(prompt), 20) for n, prompt in enumerate(asked)]
    for each in again:
        engine.engine.submit(each)
    engine.wait_stats(lambda stats: stats.loading == 2)
    assert engine.engine.stats().waiting == 4
    kvd.process.send_signal(signal.SIGCONT)
    engine.sink.wait_ended(*again)
    assert [engine.sink.tokens[each] for each in again] == expected
    engine.wait_at_rest()
