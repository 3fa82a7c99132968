"""The runs of an engine: what happens to each between its submission and its last word."""

from __future__ import annotations

import structlog

from pipeline.protocol.failure import Ending
from pipeline.protocol.tokens import TokenRecord
from workers.batch import ScheduledChunk
from workers.block_flow import BlockFlow
from workers.endings import (
    BROKEN,
    CANCELLED,
    LATE,
    LENGTH,
    NO_ROOM,
    STOP,
    UNFIT,
    ending_after_token,
    is_end_token,
)
from workers.engine_port import Cancel, EngineSink
from workers.engine_stats import StepMeter
from workers.kv_jobs import LoadJob, StoreJob
from workers.model import ModelSpec
from workers.run_setup import set_up_run
from workers.scheduler import Scheduler
from workers.sequence import Sequence, SequencePhase, StepOutput
from workers.sequence_run import SequenceRun
from workers.stop_matching import StopMatcherFactory

_PREFETCHED_AHEAD = 4  # waiting runs, by rank

log = structlog.get_logger(__name__)


class RunBook:
    """All runs that have not had their last word, by sequence. Engine thread only.

    A run is accepted, admitted, started, extended token by token, and ended or handed over; each
    method takes it one such step further and keeps scheduler, block flow and sink in accord.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        flow: BlockFlow,
        meter: StepMeter,
        sink: EngineSink,
        spec: ModelSpec,
        stop_matcher: StopMatcherFactory,
    ) -> None:
        self._scheduler = scheduler
        self._long_runs = scheduler.long_runs
        self._flow = flow
        self._meter = meter
        self._sink = sink
        self._spec = spec
        self._stop_matcher = stop_matcher
        self._runs: dict[Sequence, SequenceRun] = {}
        self._num_arrived = 0
        self._outputs: list[StepOutput] = []
        self._prefilled: list[SequenceRun] = []

    @property
    def sequences(self) -> list[Sequence]:
        """Everyone here, in order of arrival."""
        return list(self._runs)

    @property
    def is_idle(self) -> bool:
        """Nobody who was ever admitted is left."""
        return not any(run.was_admitted for run in self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)

    def accept(self, sequence: Sequence, max_drafts: int) -> None:
        """Let a new sequence wait, unless its end is known already."""
        self._num_arrived += 1
        run = SequenceRun(sequence, self._num_arrived)
        self._runs[sequence] = run
        self._scheduler.add(run)
        ending = set_up_run(run, self._spec, self._flow, self._stop_matcher, max_drafts)
        if ending is None and not self._scheduler.fits(run):
            ending = UNFIT
            log.info(
                "context_too_long",
                request_id=sequence.request_id,
                num_tokens=len(sequence.tokens),
                **self._scheduler.limits,
            )
        if ending is not None:
            self.end(run, ending)

    def cancel(self, command: Cancel) -> None:
        """End what a command names, in whatever phase it is; nothing for unknown ids."""
        for sequence, run in list(self._runs.items()):
            if sequence.request_id == command.request_id and command.attempt in (
                None,
                sequence.attempt,
            ):
                self.end(run, command.ending, silent=command.silent)

    def end_late(self, now_s: float) -> None:
        """End the runs whose deadline has passed."""
        late = [
            run
            for sequence, run in self._runs.items()
            if sequence.deadline_s is not None and sequence.deadline_s <= now_s
        ]
        for run in late:
            self.end(run, LATE)

    def admit(self, *, is_draining: bool) -> None:
        """Give blocks to those who are next, and have the tiers load what HBM lacks.

        For the first of those who go on waiting the tiers fetch ahead.
        """
        for run in self._scheduler.admit(is_draining=is_draining):
            self._count_admitted(run)
            if not self._flow.begin_load(run, self._meter.prefill_rate.per_s):
                self._start(run)
        for run in self._scheduler.standing_aside() if not is_draining else []:
            self._count_admitted(run)
        for run in self._scheduler.next_in_line(_PREFETCHED_AHEAD):
            self._flow.prefetch(run, self._meter.prefill_rate.per_s)

    def _count_admitted(self, run: SequenceRun) -> None:
        if not run.was_admitted:
            run.was_admitted = True
            self._sink.on_admitted(run.sequence)

    def _start(self, run: SequenceRun) -> None:
        sequence = run.sequence
        if not run.was_started:
            run.was_started = True
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt_tokens)
            self._meter.num_cached_tokens += sequence.num_cached
            use = run.cache_use
            num_below = min(use.num_loaded, sequence.num_cached)
            sequence.cache_use = use.model_copy(
                update={"hbm_tokens": sequence.num_cached - num_below}
            )
        self._scheduler.start(run)

    def finish_move(self, job: LoadJob | StoreJob, now_s: float) -> None:
        """Go on with whoever waited for the mover."""
        run = self._flow.finish(job)
        if run is None:
            return
        if run.sequence.phase is SequencePhase.DONE:
            self._scheduler.release(run)
        elif isinstance(job, LoadJob):
            self._flow.count_loaded(job, run)
            self._start(run)
        elif job.is_cooling:
            self._flow.swap_cooled(job, run)
            self._long_runs.count_cooled(run, job.num_cooled, now_s)
        elif job.is_spill:
            self._scheduler.come_back(run)
        else:
            self._finish_hand_over(run)

    def cool(self, now_s: float) -> None:
        """Have blocks of the long run go to the node's DRAM; take it back if those there are lost."""
        run = self._long_runs.current
        if run is None or run.sequence.phase is not SequencePhase.RUNNING or run.job is not None:
            return
        if self.find_lost() is not None:
            self._scheduler.leave(run)
            self._scheduler.come_back(run)
            self._meter.num_preemptions += 1
            run.num_losses += 1
        if self._long_runs.is_hopeless(run):
            self.end(run, NO_ROOM)
        elif num_blocks := self._long_runs.num_to_cool(run, now_s):
            self._flow.begin_cooling(run, num_blocks)

    def find_lost(self) -> SequenceRun | None:
        """The long run, if what steps read of its context up to now may not have been its context."""
        run = self._long_runs.current
        is_lost = run is not None and run.long is not None and not run.long.cold.are_kept
        return run if is_lost else None

    def spill(self, run: SequenceRun) -> None:
        """Bring what a preempted run has computed to the tiers; `finish_move` lets it wait again."""
        self._flow.begin_spill(run)
        self._meter.num_spills += 1

    def extend(self, chunk: ScheduledChunk, records: list[TokenRecord]) -> None:
        """Append a step's tokens to a sequence, up to one that ends it."""
        run = chunk.run
        if not records:
            self.end(run, LENGTH)
        if chunk.drafts and run.lookup is not None:
            run.lookup.learn(len(chunk.drafts), len(records) - 1)
            self._meter.count_drafts(len(chunk.drafts), len(records) - 1)
        for number, record in enumerate(records):
            if number:  # the one before was a draft that held: its KV is there
                run.sequence.num_computed += 1
            self._append(run, record)
            if run.sequence.phase is SequencePhase.DONE:
                break

    def _append(self, run: SequenceRun, record: TokenRecord) -> None:
        sequence = run.sequence
        if is_end_token(sequence, record.token_id, self._spec):
            self.end(run, STOP)
            return
        sequence.tokens.append(record.token_id)
        try:
            ending = ending_after_token(sequence, run.stop_matcher, self._spec)
        except Exception:
            log.exception("stop_matcher_failed", request_id=sequence.request_id)
            ending = BROKEN
        if ending is not None:
            self.end(run, ending, record)
            return
        if run.rules is not None:
            run.rules.add(record.token_id)
        index = sequence.num_generated - 1
        scores = run.take_prompt_records()
        self._outputs.append(StepOutput(sequence, index, record, prompt_records=scores))
        if sequence.hands_over:
            self._prefilled.append(run)

    def tell(self) -> None:
        """Pass on the step's outputs, then hand over what has its first token out."""
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            self._sink.on_step(outputs)
        prefilled, self._prefilled = self._prefilled, []
        for run in prefilled:
            if run.sequence.phase is SequencePhase.RUNNING:
                self._scheduler.leave(run)
                run.sequence.phase = SequencePhase.STORING
            if run.job is not None:  # blocks of it are on their way to DRAM
                self._prefilled.append(run)
            elif run.sequence.phase is not SequencePhase.DONE and not self._flow.begin_hand_over(
                run
            ):
                self._finish_hand_over(run)

    def _finish_hand_over(self, run: SequenceRun) -> None:
        del self._runs[run.sequence]
        run.sequence.phase = SequencePhase.DONE
        self._scheduler.release(run)
        self._meter.num_finished += 1
        self._sink.on_prefilled(run.sequence)

    def end(
        self,
        run: SequenceRun,
        ending: Ending,
        record: TokenRecord | None = None,
        *,
        silent: bool = False,
    ) -> None:
        """The run's last word; its blocks go back now, or once a move under way has stopped."""
        sequence = run.sequence
        self._scheduler.leave(run)
        run.end_prefetch()
        sequence.phase = SequencePhase.DONE
        sequence.ending = ending
        if run.job is None:
            self._scheduler.release(run)
        else:
            run.job.is_abandoned = True
        del self._runs[sequence]
        self._meter.num_finished += 1
        if not silent:
            index = sequence.num_generated - (record is not None)
            scores = run.take_prompt_records()
            self._outputs.append(StepOutput(sequence, index, record, ending, scores))

    def cut_off(self) -> list[Sequence]:
        """Take everyone out without a last word: another worker goes on with them."""
        left = list(self._runs)
        for run in list(self._runs.values()):
            self.end(run, CANCELLED, silent=True)
            run.sequence.ending = None
        return left
