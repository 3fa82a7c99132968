"""The engine: one thread that owns the device and runs step after step."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping

import structlog

from pipeline.protocol.failure import Ending
from pipeline.protocol.request import Priority
from workers.batch import BatchBuilder, ScheduledChunk, advance
from workers.block_flow import BlockFlow
from workers.block_table import BlockPool
from workers.endings import BROKEN, CANCELLED, UNFIT
from workers.engine_port import (
    Cancel,
    Command,
    EngineSink,
    EngineStopped,
    Expect,
    ForgetCached,
    Submit,
)
from workers.engine_stats import EngineStats, StepMeter
from workers.kv_jobs import KvMover, LoadJob, PrefetchJob, StoreJob
from workers.long_runs import LongRuns
from workers.model import ModelRunner
from workers.run_book import RunBook
from workers.scheduler import Scheduler
from workers.sequence import Sequence
from workers.settings import EngineSettings
from workers.step_runner import StepRunner
from workers.stop_matching import StopMatcherFactory

__all__ = ["Engine", "EngineSink", "EngineStats", "EngineStopped"]

log = structlog.get_logger(__name__)

_MAX_FAILED_STEPS = 3
_WATCHDOG_S = 0.25  # an engine with sequences but no step looks again this often
_LAST_STEP_S = 30.0  # how long `stop` waits for a step under way, beyond the drain


class Engine:
    """Runs sequences until they end or are handed over. See `EngineSink` for what comes back.

    `ready` is set once the first step could run (or the start failed), `failed` when the thread
    ended by a fault: what is left then comes back from `stop`. `turn_under_way` counts the turns, and is
    0 while the thread waits for something to do.
    """

    def __init__(
        self,
        runner: ModelRunner,
        settings: EngineSettings,
        mover: KvMover,
        sink: EngineSink,
        stop_matcher: StopMatcherFactory,
    ) -> None:
        self.ready = threading.Event()
        self.failed = threading.Event()
        self._runner = runner
        self._settings = settings
        self._mover = mover
        self._blocks = BlockPool(settings.num_blocks)
        long_runs = LongRuns(settings.num_blocks, settings.block_tokens, mover)
        self._scheduler = Scheduler(self._blocks, settings, long_runs, can_spill=mover.is_enabled)
        self._flow = BlockFlow(self._blocks, mover, settings)
        batches = BatchBuilder(
            settings.block_tokens, settings.max_batch_tokens, settings.max_batch_sequences
        )
        self._steps = StepRunner(runner, batches)
        self._meter = StepMeter()
        self._book = RunBook(
            self._scheduler, self._flow, self._meter, sink, runner.spec, stop_matcher
        )
        self.turn_under_way = 0
        self._num_turns = 0
        self._num_failed_in_row = 0
        self._inbox: deque[Command] = deque()
        self._wake = threading.Event()
        self._drain_until_s: float | None = None
        self._cut_off: list[Sequence] = []
        self._has_ended = False
        self._gate = threading.Lock()  # what came before the end is in the answer of `stop`
        self._stats = self._snapshot()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread; wait on `ready`, then look at `failed`."""
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        """Take a sequence in; it belongs to the engine thread until its last output. Any thread.

        Raises:
            EngineStopped: `stop` has answered.
        """
        with self._gate:
            if self._has_ended:
                raise EngineStopped
            self._send(Submit(sequence))

    def cancel(
        self,
        request_id: str,
        attempt: int | None = None,
        ending: Ending | None = None,
        *,
        silent: bool = False,
    ) -> None:
        """End a request before the next step, in whatever phase. Any thread; unknown ids pass.

        attempt: None ends all attempts. silent: no output (a stale attempt has nothing to say).
        """
        self._send(Cancel(request_id, attempt, ending or CANCELLED, silent))

    def foresee(self, job: PrefetchJob) -> None:
        """Have the tiers bring up what HBM lacks of somebody's blocks who is not here yet. Any thread."""
        self._send(job)

    def expect(self, waiting: Mapping[Priority, int]) -> None:
        """So many prompts wait outside for a worker. Any thread."""
        self._send(Expect(waiting))

    def forget_cached(self) -> threading.Event:
        """Empty the HBM prefix cache before the next step; the event is set when it is done."""
        done = threading.Event()
        self._send(ForgetCached(done))
        return done

    def stop(self, drain_s: float) -> list[Sequence]:
        """Admit no more, let admitted sequences run on for up to `drain_s`, end the thread.

        Answers the sequences that were cut off or never admitted; they got no ending. Their full
        blocks have been offered to the tiers.
        """
        self._drain_until_s = time.monotonic() + drain_s
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(drain_s + _LAST_STEP_S)
            if self._thread.is_alive():
                log.error("engine_did_not_stop", num_sequences=len(self._book))
                return self._book.sequences
        with self._gate:
            self._has_ended = True
        late = [command.sequence for command in self._inbox if isinstance(command, Submit)]
        return self._cut_off + late

    def stats(self) -> EngineStats:
        """A snapshot between two steps. Any thread."""
        return self._stats

    def _send(self, command: Command) -> None:
        self._inbox.append(command)
        self._wake.set()

    def _main(self) -> None:
        try:
            self._set_up()
            self.ready.set()
            while not self._is_over():
                self._turn()
        except Exception:
            # The edge of this thread: the worker sees `failed` and ends, others go on with its requests.
            log.exception("engine_failed", num_sequences=len(self._book))
            self.failed.set()
        self.ready.set()
        self._let_go()

    def _set_up(self) -> None:
        pool = self._runner.make_pool(self._settings.num_blocks)
        self._runner.warm_up(self._settings.max_batch_tokens)
        self._mover.start(pool, self._runner.spec.layout.block_tokens, self._send)

    def _is_over(self) -> bool:
        if self._num_failed_in_row >= _MAX_FAILED_STEPS:
            log.error("engine_failed", num_failed_steps=self._num_failed_in_row)
            self.failed.set()
            return True
        if self._drain_until_s is None:
            return False
        return self._book.is_idle or time.monotonic() >= self._drain_until_s

    def _turn(self) -> None:
        """Commands, admissions, one step, and word of it; waits if there was nothing to run."""
        self._wake.clear()
        self._num_turns += 1
        self.turn_under_way = self._num_turns
        while self._inbox:
            self._take(self._inbox.popleft())
        self._book.end_late(time.monotonic())
        self._book.cool(time.monotonic())
        self._book.admit(is_draining=self._drain_until_s is not None)
        plan = self._scheduler.plan_step(is_mover_busy=self._flow.is_busy)
        self._meter.num_preemptions += len(plan.preempted)
        for run in plan.spilled:
            self._book.spill(run)
        for run in plan.unfit:
            self._book.end(run, UNFIT)
        if plan.chunks:
            self._step(plan.chunks)
        self._book.tell()
        self._stats = self._snapshot()
        if not (plan.chunks or plan.unfit or plan.preempted):
            self.turn_under_way = 0
            self._wake.wait(_WATCHDOG_S if self._book else None)

    def _take(self, command: Command) -> None:
        match command:
            case Submit(sequence):
                self._book.accept(sequence, self._settings.speculation_tokens)
            case Cancel():
                self._book.cancel(command)
            case Expect(waiting):
                self._scheduler.expect(waiting)
            case ForgetCached(done):
                self._blocks.forget_cached()
                done.set()
            case LoadJob() | StoreJob():
                self._book.finish_move(command, time.monotonic())
            case PrefetchJob():
                self._flow.foresee(command, self._meter.prefill_rate.per_s)

    def _step(self, chunks: list[ScheduledChunk]) -> None:
        started_s = time.perf_counter()
        try:
            result = self._steps.run(chunks)
        except Exception:
            # The edge to the model: a fault in it ends the sequences of this step and no others.
            if self._book.find_lost() is not None:
                log.warning("step_with_lost_blocks_failed", exc_info=True)
                return  # no fault of the model's: what is lost is taken back, the others step again
            log.exception("step_failed", num_sequences=len(chunks))
            self._num_failed_in_row += 1
            self._meter.num_failed_steps += 1
            for chunk in chunks:
                self._book.end(chunk.run, BROKEN)
            return
        self._num_failed_in_row = 0
        at_end = [chunk for chunk in chunks if chunk.reaches_end]
        lost = self._book.find_lost()
        if lost is not None:  # a step has read what was not its context: it is as if it had not run
            chunks = [chunk for chunk in chunks if chunk.run is not lost]
        num_tokens, num_decode = advance(chunks)
        self._flow.settle(chunk.run for chunk in chunks)
        for chunk, records in zip(at_end, result.tokens, strict=True):
            if chunk.run is not lost:
                self._book.extend(chunk, records)
        step_s = time.perf_counter() - started_s
        self._meter.count_step(num_tokens, num_decode, step_s, result.model_s)
        self._scheduler.learn_step(chunks, step_s)

    def _let_go(self) -> None:
        """Stop the mover and give all blocks back; who still runs was cut off."""
        self._cut_off = self._book.cut_off()
        self._mover.stop()
        for command in list(self._inbox):
            if isinstance(command, LoadJob | StoreJob):
                self._book.finish_move(command, time.monotonic())
        self._stats = self._snapshot()

    def _snapshot(self) -> EngineStats:
        return self._meter.snapshot(self._scheduler, self._flow, self._blocks, self._mover)
