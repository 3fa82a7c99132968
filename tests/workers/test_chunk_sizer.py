"""Chunks of prompts beside decode rows, on a machine of simulated speed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from workers.chunk_sizer import ChunkSizer


@dataclass
class Machine:
    """A step takes `base_s`, `row_s` for each decode row and `token_s` for each prompt token."""

    base_s: float = 0.02
    row_s: float = 0.001
    token_s: float = 0.001

    def step_s(self, num_prefill: int, num_decode: int) -> float:
        return self.base_s + self.row_s * num_decode + self.token_s * num_prefill

    def run(
        self, sizer: ChunkSizer, num_decode: int, num_steps: int, num_prompts: int = 1
    ) -> list[tuple[int, float]]:
        """Steps with an endless prompt: prompt tokens and seconds of each."""
        steps = []
        for _ in range(num_steps):
            num_prefill = sizer.limit(num_decode, num_prompts)
            step_s = self.step_s(num_prefill, num_decode)
            sizer.learn(num_prefill, num_decode, step_s)
            steps.append((num_prefill, step_s))
        return steps


@pytest.mark.parametrize("token_s", [0.0001, 0.0005, 0.002])
@pytest.mark.parametrize("num_decode", [1, 8, 32])
def test_no_step_is_slower_than_the_limit_and_most_use_it(token_s: float, num_decode: int) -> None:
    machine = Machine(token_s=token_s)
    quiet_s = machine.step_s(0, num_decode)

    steps = machine.run(ChunkSizer(2.0, 512), num_decode, 300)

    assert max(step_s for _, step_s in steps) <= 2.0 * quiet_s
    settled = [step_s for num_prefill, step_s in steps[50:] if 8 < num_prefill < 512]
    assert all(step_s >= 1.4 * quiet_s for step_s in settled)


def test_chunks_shrink_when_a_context_makes_them_dearer() -> None:
    sizer = ChunkSizer(2.0, 512)
    before = Machine(token_s=0.0002).run(sizer, 8, 100)[-1][0]

    after = Machine(token_s=0.001).run(sizer, 8, 20)

    assert after[-1][0] < before / 3
    assert after[-1][1] <= 2.0 * Machine().step_s(0, 8)


def test_a_prompt_goes_on_however_dear_its_tokens_are() -> None:
    steps = Machine(token_s=1.0).run(ChunkSizer(2.0, 512), 8, 40)

    assert all(num_prefill == 4 for num_prefill, _ in steps[1:])


def test_steps_that_nobody_notices_are_not_cut() -> None:
    steps = Machine(base_s=0.0001, row_s=0.0, token_s=0.00001).run(ChunkSizer(2.0, 512), 8, 60)

    assert steps[-1][0] == 512


def test_decode_rows_are_looked_at_alone_now_and_then() -> None:
    steps = Machine().run(ChunkSizer(2.0, 512), 8, 400)

    alone = [number for number, (num_prefill, _) in enumerate(steps) if not num_prefill]
    assert 3 <= len(alone) <= 12


def test_a_look_that_somebody_else_made_slow_lets_no_steps_grow_much() -> None:
    machine, sizer = Machine(), ChunkSizer(2.0, 512)
    settled_s = machine.run(sizer, 8, 60)[-1][1]

    sizer.learn(0, 8, 5 * machine.step_s(0, 8))

    assert max(step_s for _, step_s in machine.run(sizer, 8, 60)) <= 1.1 * settled_s


def test_what_decode_rows_take_alone_is_followed_as_their_contexts_grow() -> None:
    sizer = ChunkSizer(2.0, 512)
    Machine().run(sizer, 8, 100)

    steps = Machine(base_s=0.04).run(sizer, 8, 700)

    assert steps[-1][1] >= 1.4 * Machine(base_s=0.04).step_s(0, 8)


@pytest.mark.parametrize(("num_decode", "num_prompts"), [(1, 31), (8, 24), (16, 16), (31, 1)])
def test_rows_and_waiting_prompts_share_the_time_by_their_numbers(
    num_decode: int, num_prompts: int
) -> None:
    machine = Machine()
    quiet_s = machine.step_s(0, num_decode)

    steps = machine.run(ChunkSizer(2.0, 100_000), num_decode, 60, num_prompts)

    allowed = max(2.0, 1 + num_prompts / num_decode)
    assert 0.6 * allowed * quiet_s <= steps[-1][1] <= allowed * quiet_s


def test_when_the_other_prompts_are_done_chunks_shrink_at_once() -> None:
    machine, sizer = Machine(), ChunkSizer(2.0, 512)
    machine.run(sizer, 4, 60, num_prompts=40)

    steps = machine.run(sizer, 4, 20, num_prompts=1)

    assert max(step_s for _, step_s in steps) <= 2.0 * machine.step_s(0, 4)


def test_the_first_chunk_is_small_and_says_little_if_it_seems_to_cost_nothing() -> None:
    sizer = ChunkSizer(2.0, 512)
    sizer.learn(0, 8, 0.02)

    first = sizer.limit(8, 1)
    sizer.learn(first, 8, 0.02)

    assert first == 4
    assert sizer.limit(8, 1) <= 5


def test_a_limit_near_one_leaves_prompts_some_progress() -> None:
    steps = Machine().run(ChunkSizer(1.05, 512), 8, 40)

    assert all(num_prefill == 4 for num_prefill, _ in steps[1:])


def test_nothing_is_cut_without_decode_rows_or_without_a_limit() -> None:
    assert ChunkSizer(2.0, 512).limit(0, 1) == 512
    assert ChunkSizer(0.0, 512).limit(8, 1) == 512
