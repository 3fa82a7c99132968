"""Guesses and scored prompts in the plan of a step, and in its arrays."""

from __future__ import annotations

from pipeline.protocol.sampling import SamplingParams
from workers.batch import BatchBuilder, ScheduledChunk, advance
from workers.block_table import BlockPool
from workers.kv_jobs import NoCache
from workers.long_runs import LongRuns
from workers.prompt_lookup import PromptLookup
from workers.scheduler import Scheduler, StepPlan
from workers.sequence import Sequence
from workers.sequence_run import SequenceRun
from workers.settings import EngineSettings


class Desk:
    """A scheduler over runs whose text is one token again and again, so that all can be guessed."""

    def __init__(self, num_blocks: int, **limits: int) -> None:
        self.blocks = BlockPool(num_blocks)
        settings = EngineSettings(num_blocks=num_blocks, speculation_tokens=6, **limits)  # type: ignore[arg-type]
        self.scheduler = Scheduler(
            self.blocks, settings, LongRuns(num_blocks, 16, NoCache()), can_spill=False
        )
        self.num_arrived = 0

    def add(self, num_tokens: int, max_tokens: int = 1000, *, scores: bool = False) -> SequenceRun:
        self.num_arrived += 1
        sequence = Sequence(
            request_id=f"r{self.num_arrived}",
            attempt=1,
            tokens=[7] * num_tokens,
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(max_tokens=max_tokens),
            key_root=bytes(32),
        )
        run = SequenceRun(sequence, self.num_arrived)
        run.lookup = PromptLookup(sequence.tokens, 6, 10_000)
        run.prompt_records = [] if scores else None
        self.scheduler.add(run)
        return run

    def step(self) -> StepPlan:
        for run in self.scheduler.admit():
            self.scheduler.start(run)
        plan = self.scheduler.plan_step(is_mover_busy=False)
        at_end = [chunk for chunk in plan.chunks if chunk.reaches_end]
        advance(plan.chunks)
        for chunk in at_end:
            chunk.run.sequence.tokens.append(7)
        return plan


def drafts(plan: StepPlan) -> list[int]:
    return [len(chunk.drafts) for chunk in plan.chunks]


def test_a_decode_row_takes_its_guesses_along() -> None:
    desk = Desk(64)
    desk.add(20)
    assert drafts(desk.step()) == [0], "a prompt is not guessed"
    (chunk,) = desk.step().chunks
    assert (chunk.num_tokens, chunk.num_known, chunk.drafts) == (7, 1, (7,) * 6)


def test_no_token_is_guessed_beyond_max_tokens() -> None:
    desk = Desk(64)
    desk.add(20, max_tokens=4)
    assert [drafts(desk.step()) for _ in range(4)] == [[0], [2], [1], [0]]


def test_guesses_share_the_rows_that_are_left() -> None:
    desk = Desk(256, max_batch_tokens=512)
    for _ in range(20):
        desk.add(20)
    desk.step()
    assert drafts(desk.step()) == [6, 6] + [0] * 18
    few = Desk(64, max_batch_tokens=22)
    few.add(18)
    few.add(18)
    few.step()
    few.step()
    assert sum(chunk.num_tokens for chunk in few.step().chunks) <= 22


def test_guesses_take_no_block_from_anybody() -> None:
    desk = Desk(6)
    desk.add(30)
    desk.add(31)
    desk.step()
    assert desk.blocks.num_available == 2, "one for each to grow into"
    assert drafts(desk.step()) == [1, 0], "to the end of the blocks that they hold"
    assert desk.blocks.num_available == 2
    roomy = Desk(16)
    roomy.add(30)
    roomy.step()
    assert drafts(roomy.step()) == [6]


def test_scored_prompts_share_a_bounded_number_of_logit_rows() -> None:
    desk = Desk(256, max_batch_tokens=512)
    desk.add(100, scores=True)
    desk.add(100, scores=True)
    desk.add(100)
    for run in desk.scheduler.admit():
        desk.scheduler.start(run)
    plan = desk.scheduler.plan_step(is_mover_busy=False)
    assert [chunk.num_tokens for chunk in plan.chunks] == [100, 28, 100]
    assert [chunk.num_logit_rows for chunk in plan.chunks] == [100, 28, 1]


def test_the_arrays_of_guesses_lie_behind_the_known_token() -> None:
    sequence = Sequence(
        request_id="r",
        attempt=1,
        tokens=[1, 2, 3, 4, 5],
        num_prompt_tokens=3,
        sampling=SamplingParams(max_tokens=9),
        key_root=bytes(32),
        num_computed=4,
        block_ids=[6, 2],
    )
    chunk = ScheduledChunk(SequenceRun(sequence, 1), 3, (8, 9))
    batch = BatchBuilder(block_tokens=4, max_tokens=16, max_sequences=4).build([chunk])
    assert batch.token_ids.tolist() == [5, 8, 9]
    assert batch.positions.tolist() == [4, 5, 6]
    assert batch.slot_mapping.tolist() == [8, 9, 10]
    assert batch.context_lens.tolist() == [7]
    assert batch.logit_rows.tolist() == [0, 1, 2]
