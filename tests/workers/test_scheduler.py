"""The scheduler alone: no clock, no thread, no model."""

from __future__ import annotations

import pytest

from pipeline.protocol.request import Priority
from pipeline.protocol.sampling import SamplingParams
from tiering.block_hash import KeyChain, namespace_root
from workers.block_table import BlockPool
from workers.kv_jobs import NoCache
from workers.long_runs import LongRuns
from workers.scheduler import Scheduler, StepPlan
from workers.sequence import Sequence, SequencePhase
from workers.sequence_run import SequenceRun
from workers.settings import EngineSettings

ROOT = namespace_root({"test": "scheduler"})


class Desk:
    """A scheduler with runs that compute what they are told and sample token 7."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        can_spill: bool = False,
        max_cold_blocks: int = 0,
        **limits: int,
    ) -> None:
        self.settings = EngineSettings(num_blocks=num_blocks, **limits)  # type: ignore[arg-type]
        self.blocks = BlockPool(num_blocks)
        below = NoCache()
        below.max_cold_blocks = max_cold_blocks
        self.scheduler = Scheduler(
            self.blocks, self.settings, LongRuns(num_blocks, 16, below), can_spill=can_spill
        )
        self.num_arrived = 0

    def add(
        self, num_tokens: int, priority: Priority = Priority.NORMAL, max_tokens: int = 1000
    ) -> SequenceRun:
        self.num_arrived += 1
        sequence = Sequence(
            request_id=f"r{self.num_arrived}",
            attempt=1,
            tokens=[self.num_arrived] * num_tokens,
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(max_tokens=max_tokens),
            key_root=ROOT,
            priority=priority,
        )
        run = SequenceRun(sequence, self.num_arrived, chain=KeyChain(ROOT))
        run.extend_keys(num_tokens, 16)
        self.scheduler.add(run)
        return run

    def admit(self) -> list[SequenceRun]:
        admitted = self.scheduler.admit()
        for run in admitted:
            run.was_admitted = True
            self.scheduler.start(run)
        return admitted

    def step(self, *, is_mover_busy: bool = False) -> StepPlan:
        self.admit()
        plan = self.scheduler.plan_step(is_mover_busy=is_mover_busy)
        for chunk in plan.chunks:
            sequence = chunk.run.sequence
            is_end = chunk.reaches_end
            sequence.num_computed += chunk.num_tokens
            assert len(sequence.block_ids) * 16 >= sequence.num_computed
            if is_end:
                sequence.tokens.append(7)
        return plan

    def end(self, run: SequenceRun) -> None:
        self.scheduler.leave(run)
        run.sequence.phase = SequencePhase.DONE
        self.scheduler.release(run)


def sizes(plan: StepPlan) -> list[tuple[str, int]]:
    return [(chunk.run.sequence.request_id, chunk.num_tokens) for chunk in plan.chunks]


def test_a_prompt_is_cut_into_chunks_of_the_step_budget() -> None:
    desk = Desk(max_batch_tokens=48)
    desk.add(100)
    assert [sizes(desk.step()) for _ in range(4)] == [
        [("r1", 48)],
        [("r1", 48)],
        [("r1", 4)],
        [("r1", 1)],
    ]


def test_decode_rows_go_before_prefill_chunks_and_share_the_budget() -> None:
    desk = Desk(max_batch_tokens=48)
    desk.add(10)
    desk.step()
    desk.add(100)
    assert sizes(desk.step()) == [("r1", 1), ("r2", 47)]


def test_prefill_gets_a_share_even_if_decode_rows_fill_the_budget() -> None:
    desk = Desk(max_batch_tokens=16, max_batch_sequences=64, num_blocks=256)
    for _ in range(32):
        desk.add(1)
    for _ in range(4):
        desk.step()
    late = desk.add(64)
    for _ in range(16):
        desk.step()
    assert late.sequence.num_generated >= 1


def test_decode_rows_beyond_the_budget_take_turns() -> None:
    desk = Desk(max_batch_tokens=16, max_batch_sequences=64, num_blocks=256)
    runs = [desk.add(1) for _ in range(40)]
    for _ in range(30):
        desk.step()
    counts = [run.sequence.num_generated for run in runs]
    assert max(counts) - min(counts) <= 1


def test_admission_follows_priority_and_then_arrival() -> None:
    desk = Desk(max_batch_sequences=1)
    running = desk.add(1)
    desk.admit()
    late_low, low, high, normal = (
        desk.add(1, Priority.BATCH),
        desk.add(1, Priority.LOW),
        desk.add(1, Priority.HIGH),
        desk.add(1),
    )
    order = []
    for _ in range(4):
        desk.end(running)
        (running,) = desk.admit()
        order.append(running)
    assert order == [high, normal, low, late_low]


def test_prefill_chunks_go_by_priority() -> None:
    desk = Desk(max_batch_tokens=32)
    desk.add(64, Priority.LOW)
    desk.step()
    desk.add(64, Priority.HIGH)
    assert sizes(desk.step()) == [("r2", 32)]


def tokens_beside_a_stream(desk: Desk) -> int:
    """Prompt tokens of a step when the sizer has learnt that a row takes 20 ms, a token 1 ms."""
    num_tokens = 0
    for _ in range(8):
        plan = desk.step()
        num_tokens = sum(chunk.num_tokens for chunk in plan.chunks) - 1
        desk.scheduler.learn_step(plan.chunks, 0.02 + 0.001 * num_tokens)
    return num_tokens


def sized_desk(max_batch_sequences: int = 64) -> Desk:
    """With one stream."""
    desk = Desk(
        num_blocks=600,
        max_batch_tokens=256,
        max_decode_slowdown=2,
        max_batch_sequences=max_batch_sequences,
    )
    desk.add(16)
    desk.step()
    return desk


@pytest.mark.parametrize(
    ("priority", "least", "most"), [(Priority.NORMAL, 150, 165), (Priority.BATCH, 8, 11)]
)
def test_a_stream_makes_way_for_many_prompts_unless_they_are_less_urgent(
    priority: Priority, least: int, most: int
) -> None:
    desk = sized_desk()
    for _ in range(8):
        desk.add(1000, priority)

    assert least <= tokens_beside_a_stream(desk) <= most


@pytest.mark.parametrize(
    ("waiting", "num_places", "least", "most"),
    [
        ({Priority.NORMAL: 7}, 64, 150, 165),  # 8 prompts and a row: 160 ms beside 20
        ({Priority.HIGH: 3, Priority.NORMAL: 4, Priority.BATCH: 90}, 64, 150, 165),
        ({Priority.BATCH: 90}, 64, 18, 21),
        ({Priority.NORMAL: 90}, 4, 57, 63),  # two places are free: 3 prompts and a row
    ],
)
def test_a_stream_makes_way_for_prompts_outside_that_have_a_place(
    waiting: dict[Priority, int], num_places: int, least: int, most: int
) -> None:
    desk = sized_desk(num_places)
    desk.scheduler.expect(waiting | {Priority.NORMAL: waiting.get(Priority.NORMAL, 0) + 1})
    desk.add(4000)  # the one that comes is expected no more

    assert least <= tokens_beside_a_stream(desk) <= most


def test_one_that_comes_back_from_preemption_was_not_expected() -> None:
    desk = Desk(num_blocks=4)
    desk.scheduler.expect({Priority.NORMAL: 3})
    desk.add(20)
    desk.add(20)
    for _ in range(30):
        if desk.step().preempted:
            break

    assert desk.scheduler.num_waiting == 1
    assert desk.scheduler._expected == {Priority.NORMAL: 1}


def test_a_stream_does_not_make_way_for_prompts_that_would_wait_for_blocks() -> None:
    desk = sized_desk()
    desk.add(4000)
    desk.scheduler.expect({Priority.NORMAL: 90})
    desk.add(9000)  # more than the first two leave of the pool

    assert 18 <= tokens_beside_a_stream(desk) <= 21
    assert desk.scheduler.num_waiting == 1


def test_no_more_sequences_hold_blocks_than_allowed() -> None:
    desk = Desk(max_batch_sequences=3)
    for _ in range(5):
        desk.add(4)
    desk.step()
    assert (desk.scheduler.num_running, desk.scheduler.num_waiting) == (3, 2)


def test_admission_takes_the_whole_prompt_and_a_decode_block_or_nothing() -> None:
    """Fault 30 of the notes: a load and its first decode block are reserved together."""
    desk = Desk(num_blocks=8)
    desk.add(64)
    assert len(desk.admit()) == 1  # four blocks, and one to decode into
    desk.add(64)
    assert desk.admit() == []
    assert desk.blocks.num_used == 4


def test_admission_leaves_a_block_for_each_running_sequence_to_grow_into() -> None:
    desk = Desk(num_blocks=6)
    for _ in range(4):
        desk.add(16)
    assert len(desk.admit()) == 3
    assert desk.blocks.num_available == 3


def test_a_prompt_that_exactly_fills_the_pool_fits_if_it_asks_for_one_token() -> None:
    desk = Desk(num_blocks=4)
    assert desk.scheduler.fits(desk.add(64, max_tokens=1))
    assert not desk.scheduler.fits(desk.add(64, max_tokens=2))
    assert not desk.scheduler.fits(desk.add(65, max_tokens=1))


def test_blocks_found_in_the_pool_are_shared_and_counted_as_computed() -> None:
    desk = Desk()
    first = desk.add(68)
    desk.step()
    for key, block_id in zip(first.sequence.block_keys, first.sequence.block_ids, strict=False):
        desk.blocks.register(block_id, key)
    twin = desk.add(1)
    twin.sequence.tokens[:] = first.sequence.tokens[:68]
    twin.sequence.block_keys[:] = first.sequence.block_keys
    desk.admit()
    assert twin.sequence.num_computed == 64
    assert twin.sequence.block_ids[:4] == first.sequence.block_ids[:4]
    assert twin.sequence.block_ids[4] != first.sequence.block_ids[4]


def test_the_youngest_of_the_lowest_priority_is_preempted_when_blocks_run_out() -> None:
    desk = Desk(num_blocks=8)
    desk.add(31, Priority.HIGH)
    desk.step()
    young_low = desk.add(30, Priority.LOW)
    desk.step()
    preempted: list[SequenceRun] = []
    while not preempted:
        preempted = desk.step().preempted
    assert preempted == [young_low]
    assert young_low.sequence.phase is SequencePhase.WAITING
    assert young_low.sequence.num_computed == 0
    assert young_low.sequence.block_ids == []


def test_every_sequence_ends_in_a_pool_that_holds_about_one_of_them() -> None:
    desk = Desk(num_blocks=8)
    waiting = [desk.add(40, max_tokens=50) for _ in range(6)]
    for _ in range(2000):
        desk.step()
        for run in list(waiting):
            if run.sequence.num_generated >= 50:
                desk.end(run)
                waiting.remove(run)
        if not waiting:
            break
    assert waiting == []
    assert desk.blocks.num_used == 0


def test_a_sequence_alone_that_outgrows_the_pool_is_unfit() -> None:
    desk = Desk(num_blocks=2)
    run = desk.add(16)
    unfit: list[SequenceRun] = []
    for _ in range(40):
        unfit += desk.step().unfit
    assert unfit[0] is run
    assert len(run.sequence.tokens) == 33  # the last of them has no room for its KV


def test_nothing_is_unfit_while_the_mover_may_still_give_blocks_back() -> None:
    desk = Desk(num_blocks=2)
    run = desk.add(16)
    for _ in range(40):
        plan = desk.step(is_mover_busy=True)
        assert plan.unfit == []
    assert run.sequence.phase is SequencePhase.RUNNING


def test_a_draining_scheduler_takes_back_only_preempted_runs() -> None:
    desk = Desk(num_blocks=4)
    old, young = desk.add(16), desk.add(15)
    preempted: list[SequenceRun] = []
    while not preempted:
        preempted = desk.step().preempted
    fresh = desk.add(1, Priority.HIGH)
    desk.end(old)
    assert desk.scheduler.admit(is_draining=True) == [young]
    assert fresh.sequence.phase is SequencePhase.WAITING


def test_a_spilled_run_holds_its_blocks_until_they_are_stored_and_nobody_else_is_preempted() -> (
    None
):
    desk = Desk(num_blocks=9, can_spill=True)
    runs = [desk.add(30) for _ in range(3)]
    plan = desk.step()
    while not plan.preempted:
        plan = desk.step()
    assert plan.spilled == plan.preempted == [runs[2]]
    assert runs[2].sequence.phase is SequencePhase.STORING
    assert (desk.blocks.num_available, desk.scheduler.num_waiting) == (0, 1)
    assert not plan.chunks, "both others need a block now"
    assert not desk.step(is_mover_busy=True).preempted, "they wait for those that come"

    desk.scheduler.come_back(runs[2])
    plan = desk.step()
    assert (sizes(plan), plan.preempted) == ([("r1", 1), ("r2", 1)], [])


def test_a_spilled_run_that_ends_meanwhile_gives_its_blocks_back_once() -> None:
    desk = Desk(num_blocks=9, can_spill=True)
    runs = [desk.add(30) for _ in range(3)]
    while not desk.step().preempted:
        pass
    desk.end(runs[2])
    assert desk.scheduler.num_waiting == 0
    assert sizes(desk.step()) == [("r1", 1), ("r2", 1)]
    for run in runs[:2]:
        desk.end(run)
    assert desk.blocks.num_free == 9


def test_those_who_come_later_leave_a_long_run_its_window() -> None:
    """It would preempt them for it, they would come back and take it again, and so on."""
    desk = Desk(num_blocks=12, max_cold_blocks=100)
    desk.add(300)
    desk.admit()
    short = desk.add(5 * 16)
    assert desk.admit() == [], "6 blocks, 1 to grow into and 5 of the window are more than 11"
    desk.end(short)
    desk.add(4 * 16)
    assert [run.sequence.request_id for run in desk.admit()] == ["r3"]
    assert sizes(desk.step()) == [("r1", 6 * 16), ("r3", 4 * 16)]


def test_a_long_run_waits_for_the_one_before_and_lets_others_pass() -> None:
    desk = Desk(num_blocks=12, max_cold_blocks=20)
    first, second, short = desk.add(300), desk.add(300), desk.add(20)
    assert desk.admit() == [first, short]
    assert desk.scheduler.standing_aside() == [second]
    desk.end(first)
    assert desk.admit() == [second]


def test_a_run_longer_than_its_share_of_dram_fits_nowhere() -> None:
    desk = Desk(num_blocks=12, max_cold_blocks=20)
    assert desk.scheduler.fits(desk.add(20 * 16 - 1))
    assert not desk.scheduler.fits(desk.add(20 * 16))
