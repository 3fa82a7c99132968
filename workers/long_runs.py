"""Runs whose KV the HBM pool does not hold: who has the pool's window for them, and how far it reaches."""

from __future__ import annotations

from workers.cold_blocks import ColdBlocks
from workers.kv_jobs import KvMover
from workers.sequence_run import LongRun, SequenceRun

_RETRY_S = 0.25
_MAX_STALLS = 120  # half a minute without a daemon, or without room in it
_MAX_LOSSES = 8  # each costs what was computed, at worst


class LongRuns:
    """One long run at a time works in a window of half the pool, so that others run beside it.

    The blocks that it fills go to the node's DRAM, where its steps read them in place, and their
    room in the window is used again. Engine thread only.
    """

    def __init__(self, num_pool_blocks: int, block_tokens: int, mover: KvMover) -> None:
        self._block_tokens = block_tokens
        self._mover = mover
        self.window_blocks = max(num_pool_blocks // 2, 1)
        self.current: SequenceRun | None = None

    @property
    def max_blocks(self) -> int:
        """Of one long run in all; 0: there are none."""
        return self._mover.max_cold_blocks

    @property
    def num_kept_blocks(self) -> int:
        """Of the window, not taken yet: who comes later leaves them, or would take them for ever."""
        run = self.current
        return max(self.window_blocks - len(run.hot_block_ids), 0) if run is not None else 0

    def allows(self, run: SequenceRun, num_blocks: int) -> bool:
        """A run of so many blocks may be served although the pool does not hold it."""
        return run.chain is not None and num_blocks <= self.max_blocks

    def begin(self, run: SequenceRun) -> None:
        """The run gets the window; nobody has it."""
        run.long = LongRun(ColdBlocks())
        self.current = run

    def end(self, run: SequenceRun) -> None:
        """The run holds no blocks any more; nothing for one that is not long."""
        if run.long is not None:
            self._mover.give_back(run.long.cold)
            self.current = None

    def fit(self, run: SequenceRun, num_tokens: int) -> int:
        """As many of its next tokens as the window has room for; all, unless it is long."""
        if run.long is None:
            return num_tokens
        num_slots = (run.long.num_cold + self.window_blocks) * self._block_tokens
        return max(min(num_tokens, num_slots - run.sequence.num_computed), 0)

    def num_to_cool(self, run: SequenceRun, now_s: float) -> int:
        """How many of its full blocks shall leave the pool now: all, once they fill half its window."""
        if run.long is None or run.job is not None or now_s < run.long.again_at_s:
            return 0
        num_full = run.sequence.num_computed // self._block_tokens - run.long.num_cold
        return num_full if 2 * num_full >= self.window_blocks else 0

    def count_cooled(self, run: SequenceRun, num_blocks: int, now_s: float) -> None:
        """A move has brought so many of its blocks to DRAM."""
        if run.long is not None and num_blocks:
            run.long.num_cold += num_blocks
            run.long.num_stalls = 0
        elif run.long is not None:
            run.long.num_stalls += 1
            run.long.again_at_s = now_s + _RETRY_S

    def is_hopeless(self, run: SequenceRun) -> bool:
        """Its blocks find no place in DRAM, or were lost there again and again."""
        is_stalled = run.long is not None and run.long.num_stalls > _MAX_STALLS
        return is_stalled or run.num_losses > _MAX_LOSSES
