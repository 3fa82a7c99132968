"""Which sequences hold blocks, and which of them run in the next step."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.protocol.request import Priority
from workers.batch import ScheduledChunk
from workers.block_table import BlockPool
from workers.chunk_sizer import ChunkSizer
from workers.long_runs import LongRuns
from workers.sequence import SequencePhase
from workers.sequence_run import SequenceRun, num_blocks_for
from workers.settings import EngineSettings

_PREFILL_SHARE = 4  # while prompts wait, decode rows leave them a fourth of a step
_MAX_ROWS_WITH_DRAFTS = 32  # beyond that a row costs as much now as it would in its own step
_MAX_SCORED_TOKENS = 128  # of a step: each needs a whole row of logits


@dataclass(slots=True)
class StepPlan:
    """One step: `chunks` to run, decode rows first.

    preempted: gave their blocks back and wait again. spilled: of these, the ones that still hold
    their blocks, for the engine to store; `come_back` then. num_awaited: blocks that runs of this
    plan wait for. unfit: will never fit the pool; the engine ends them.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    preempted: list[SequenceRun] = field(default_factory=list)
    spilled: list[SequenceRun] = field(default_factory=list)
    num_awaited: int = 0
    unfit: list[SequenceRun] = field(default_factory=list)


class Scheduler:
    """Continuous batching with chunked prefill over one block pool. Pure: no clock, no thread.

    Admission goes strictly by rank (priority, then arrival) and takes the blocks of the whole
    prompt at once, so that a load and the first decode block never wait for each other. While
    others run, it leaves one block for each of them to grow into, to a long one its window. Decode
    grows block by block; when the pool is out, the lowest-ranked running sequence gives its blocks
    back and waits again. With a tier below (`can_spill`), what it has computed is stored first, and
    who needs the blocks waits for that. A run that is longer than the pool gets no more than a
    window of it, see `LongRuns`; one that outgrows the pool is preempted, and comes back as such.
    """

    def __init__(
        self, blocks: BlockPool, settings: EngineSettings, long_runs: LongRuns, *, can_spill: bool
    ) -> None:
        self._blocks = blocks
        self.long_runs = long_runs
        self._settings = settings
        self._can_spill = can_spill
        self._spilling: set[SequenceRun] = set()
        self._waiting: list[SequenceRun] = []
        self._running: list[SequenceRun] = []
        self._sizer = ChunkSizer(settings.max_decode_slowdown, settings.max_batch_tokens)
        self._num_loading = 0
        self._turn = 0
        self._expected: dict[Priority, int] = {}

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks, or about to be."""
        return len(self._waiting) + len(self._spilling)

    @property
    def num_running(self) -> int:
        """Sequences that take part in steps."""
        return len(self._running)

    @property
    def num_loading(self) -> int:
        """Admitted sequences whose cached blocks are on the way."""
        return self._num_loading

    @property
    def num_cold_blocks(self) -> int:
        """Blocks of the long run that steps read in the node's DRAM."""
        run = self.long_runs.current
        return run.num_cold if run is not None else 0

    @property
    def limits(self) -> dict[str, int]:
        """What one run may have: of the pool, and of the node's DRAM if it is longer."""
        return {"hbm_blocks": self._blocks.num_total, "dram_blocks": self.long_runs.max_blocks}

    def fits(self, run: SequenceRun) -> bool:
        """False if the tokens known so far and the next one find room nowhere, ever."""
        num_blocks = self._num_blocks_at_start(run)
        return num_blocks <= self._blocks.num_total or self.long_runs.allows(run, num_blocks)

    def add(self, run: SequenceRun) -> None:
        """Let the run wait for admission."""
        run.sequence.phase = SequencePhase.WAITING
        if not run.was_admitted:
            priority = run.sequence.priority
            self._expected[priority] = max(0, self._expected.get(priority, 0) - 1)
        insort(self._waiting, run, key=lambda waiting: waiting.rank)

    def expect(self, waiting: Mapping[Priority, int]) -> None:
        """So many prompts wait outside: each that comes is one less, until we are told again."""
        self._expected = dict(waiting)

    def admit(self, *, is_draining: bool = False) -> list[SequenceRun]:
        """Give blocks to waiting runs in order, as far as they and the limits reach.

        The caller lets each either `start` at once or load first. Blocks found in HBM are shared
        and counted as computed. While draining only preempted runs come back.
        """
        admitted: list[SequenceRun] = []
        for run in list(self._waiting):
            if (is_draining and not run.was_admitted) or self._stands_aside(run):
                continue
            num_active = len(self._running) + self._num_loading
            if num_active >= self._settings.max_batch_sequences or not self._take_blocks(run):
                break
            self._waiting.remove(run)
            run.sequence.phase = SequencePhase.LOADING
            self._num_loading += 1
            admitted.append(run)
        return admitted

    def standing_aside(self) -> list[SequenceRun]:
        """Long runs that wait for another one to end: nobody else is to wait behind them."""
        if self.long_runs.current is None:
            return []
        return [run for run in self._waiting if self._is_long(run)]

    def next_in_line(self, count: int) -> list[SequenceRun]:
        """The first of those who wait for blocks."""
        return self._waiting[:count]

    def start(self, run: SequenceRun) -> None:
        """The admitted run has all blocks it will get from the tiers; it takes part in steps."""
        self._num_loading -= 1
        run.sequence.phase = SequencePhase.RUNNING
        insort(self._running, run, key=lambda running: running.rank)

    def leave(self, run: SequenceRun) -> None:
        """Take the run out of whatever line it stands in; its blocks stay held."""
        match run.sequence.phase:
            case SequencePhase.WAITING:
                self._waiting.remove(run)
            case SequencePhase.LOADING:
                self._num_loading -= 1
            case SequencePhase.RUNNING:
                self._running.remove(run)
            case SequencePhase.STORING | SequencePhase.DONE:
                pass

    def release(self, run: SequenceRun) -> None:
        """Give the run's blocks back; `num_computed` still tells how far it came."""
        self._spilling.discard(run)
        self._blocks.release(run.hot_block_ids)
        self.long_runs.end(run)
        run.forget_blocks()

    def come_back(self, run: SequenceRun) -> None:
        """A spilled run's blocks are stored, or given up: it waits for blocks again."""
        self.release(run)
        run.sequence.num_computed = 0
        self.add(run)

    def plan_step(self, *, is_mover_busy: bool) -> StepPlan:
        """Choose the next step and grow block tables for it.

        is_mover_busy: blocks may come back without a preemption once the mover has answered, so
        nothing is judged unfit yet.
        """
        plan = StepPlan()
        decoding = [run for run in self._running if run.num_pending == 1]
        prefilling = [run for run in self._running if run.num_pending > 1]
        budget = self._settings.max_batch_tokens
        num_rows = budget - max(1, budget // _PREFILL_SHARE) if prefilling else budget
        if len(decoding) > num_rows:  # in turns, so that nobody is left out for good
            decoding.sort(key=lambda run: run.last_turn)
        num_spare = min(num_rows, _MAX_ROWS_WITH_DRAFTS) - len(decoding)
        for run in decoding[:num_rows]:
            drafts = self._draft(run, num_spare) if run.lookup is not None else ()
            if self._place(plan, run, 1, drafts, is_mover_busy=is_mover_busy):
                budget -= 1 + len(drafts)
                num_spare -= len(drafts)
        num_prompts = self._num_urgent(prefilling, decoding)
        budget = min(budget, self._sizer.limit(len(plan.chunks), num_prompts))
        score_budget = _MAX_SCORED_TOKENS
        for run in prefilling:
            num_tokens = min(run.num_pending, budget)
            if run.needs_scoring:
                num_tokens = min(num_tokens, score_budget)
            num_tokens = self.long_runs.fit(run, num_tokens)
            if num_tokens and self._place(plan, run, num_tokens, (), is_mover_busy=is_mover_busy):
                budget -= num_tokens
                score_budget -= num_tokens if run.needs_scoring else 0
        if plan.preempted:
            plan.chunks = [chunk for chunk in plan.chunks if chunk.run not in plan.preempted]
        return plan

    def _num_urgent(self, prefilling: list[SequenceRun], decoding: list[SequenceRun]) -> int:
        """Prompts here, and those outside that have a place here, but none less urgent than some stream.

        The others wait for what only streams can leave: slowing these helps nobody.
        """
        most_urgent = min((run.sequence.priority for run in decoding), default=Priority.BATCH)
        num_here = sum(run.sequence.priority <= most_urgent for run in prefilling)
        if self._waiting:  # for blocks or a place: so would those outside
            return num_here
        num_free = self._settings.max_batch_sequences - len(self._running) - self._num_loading
        expected = (count for priority, count in self._expected.items() if priority <= most_urgent)
        return num_here + min(num_free, sum(expected))

    def learn_step(self, chunks: list[ScheduledChunk], step_s: float) -> None:
        """A planned step took so long: later chunks beside decode rows are sized by it."""
        num_rows = sum(chunk.num_known == 1 for chunk in chunks)
        num_tokens = sum(chunk.num_known for chunk in chunks)
        self._sizer.learn(num_tokens - num_rows, num_rows, step_s)

    def _place(
        self,
        plan: StepPlan,
        run: SequenceRun,
        num_known: int,
        drafts: tuple[int, ...],
        *,
        is_mover_busy: bool,
    ) -> bool:
        if run.sequence.phase is not SequencePhase.RUNNING:
            return False
        num_tokens = num_known + len(drafts)
        if not self._grow(plan, run, num_tokens, is_mover_busy=is_mover_busy):
            return False
        self._turn += 1
        run.last_turn = self._turn
        plan.chunks.append(ScheduledChunk(run, num_tokens, drafts))
        return True

    def _draft(self, run: SequenceRun, num_spare: int) -> tuple[int, ...]:
        """Guesses that cost nobody else a row or a block."""
        sequence = run.sequence
        if run.long is not None:
            return ()
        num_left = sequence.sampling.max_tokens - sequence.num_generated - 1
        # Each of the others may need a block in this very step.
        num_free = max(0, self._blocks.num_available - len(self._running))
        num_slots = (len(sequence.block_ids) + num_free) * self._settings.block_tokens
        num_fitting = num_slots - len(sequence.tokens)
        limit = min(num_spare, num_left, num_fitting)
        return run.lookup.propose(limit) if run.lookup is not None and limit > 0 else ()

    def _grow(
        self, plan: StepPlan, run: SequenceRun, num_tokens: int, *, is_mover_busy: bool
    ) -> bool:
        """Extend the block table for the next tokens, by preemption if it must be."""
        sequence = run.sequence
        if self.long_runs.fit(run, num_tokens) < num_tokens:
            return False
        num_needed = num_blocks_for(
            sequence.num_computed + num_tokens, self._settings.block_tokens
        ) - len(sequence.block_ids)
        while num_needed > self._blocks.num_available + self._num_coming - plan.num_awaited:
            victim = self._running[-1]
            if victim.job is not None:
                return False  # some of its blocks are about to leave the pool
            if victim is not run:
                self._preempt(plan, victim)
            else:
                self._give_way(plan, run, is_mover_busy=is_mover_busy)
                return False
            if is_mover_busy and num_needed > self._blocks.num_available:
                return False  # stores still hold the victim's blocks; they end within a step or so
        if num_needed > self._blocks.num_available:
            plan.num_awaited += num_needed
            return False
        if num_needed > 0:
            sequence.block_ids += self._blocks.allocate(num_needed)
        return True

    @property
    def _num_coming(self) -> int:
        """Blocks that come back when the spills under way have ended."""
        return sum(len(run.hot_block_ids) for run in self._spilling)

    def _give_way(self, plan: StepPlan, run: SequenceRun, *, is_mover_busy: bool) -> None:
        """The run itself is next to lose its blocks; alone in the pool, it has outgrown it."""
        if len(self._running) > 1:
            self._preempt(plan, run)
        elif is_mover_busy:
            return
        elif run.long is None and self._is_long(run) and self.fits(run):
            self._preempt(plan, run)
        else:
            plan.unfit.append(run)

    def _preempt(self, plan: StepPlan, run: SequenceRun) -> None:
        self._running.remove(run)
        plan.preempted.append(run)
        is_of_use = run.chain is not None and not run.needs_scoring and run.sequence.num_computed
        if self._can_spill and is_of_use:
            run.sequence.phase = SequencePhase.STORING
            self._spilling.add(run)
            plan.spilled.append(run)
        else:
            self.come_back(run)

    def _stands_aside(self, run: SequenceRun) -> bool:
        return self.long_runs.current is not None and self._is_long(run)

    def _is_long(self, run: SequenceRun) -> bool:
        return self._num_blocks_at_start(run) > self._blocks.num_total

    def _take_window(self, run: SequenceRun) -> bool:
        """Begin a long run with one block; it takes more as it grows, up to its window."""
        num_wanted = self.long_runs.window_blocks + len(self._running) + self._num_loading
        if num_wanted > self._blocks.num_available:
            return False
        self.long_runs.begin(run)
        run.sequence.block_ids = self._blocks.allocate(1)
        run.sequence.num_computed = run.num_settled_blocks = 0
        return True

    def _take_blocks(self, run: SequenceRun) -> bool:
        sequence = run.sequence
        block_tokens = self._settings.block_tokens
        if self._is_long(run):
            return self._take_window(run)
        shared: list[int] = []
        if self._settings.prefix_cache and not run.needs_scoring:
            shared = self._blocks.match(run.reusable_keys(block_tokens))
        headroom = len(self._running) + self._num_loading + self.long_runs.num_kept_blocks
        self._blocks.hold(shared)
        num_wanted = self._num_blocks_at_start(run) - len(shared) + headroom
        if num_wanted > self._blocks.num_available:
            self._blocks.release(shared)
            return False
        num_new = num_blocks_for(len(sequence.tokens), block_tokens) - len(shared)
        sequence.block_ids = shared + self._blocks.allocate(num_new)
        sequence.num_computed = len(shared) * block_tokens
        run.num_settled_blocks = len(shared)
        return True

    def _num_blocks_at_start(self, run: SequenceRun) -> int:
        """Blocks of all known tokens and, unless the next token is the last, of that one too."""
        sequence = run.sequence
        is_last = sequence.num_generated + 1 >= sequence.sampling.max_tokens
        num_tokens = len(sequence.tokens) + (0 if is_last else 1)
        return num_blocks_for(num_tokens, self._settings.block_tokens)
