"""What an engine tells about itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.scheduling.fleet import TierLoads
from pipeline.scheduling.transfer_cost import Rate
from workers.block_flow import BlockFlow
from workers.block_table import BlockPool
from workers.kv_jobs import KvMover, MoverStats
from workers.scheduler import Scheduler

_WEIGHT = 0.1  # of the newest step in the moving averages


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot between two steps.

    free + cached + used == total blocks; cold ones are none of these, see `LongRuns`. Counters run
    from the start. Averages are moving ones:
    prefill_step_s over steps with prompt tokens, decode_step_s over steps of decode rows alone,
    overhead_s the part of a step outside the model. prefill_tokens_per_s is what late steps
    computed over the time they took.
    """

    waiting: int = 0
    loading: int = 0
    running: int = 0
    storing: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    cold_blocks: int = 0
    num_steps: int = 0
    num_failed_steps: int = 0
    num_preemptions: int = 0
    num_spills: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_finished: int = 0
    num_drafts: int = 0
    num_drafts_held: int = 0
    prefill_tokens_per_s: float = 0.0
    prefill_step_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    overhead_s: float = 0.0
    mover: MoverStats = field(default_factory=MoverStats)


@dataclass(slots=True)
class StepMeter:
    """Counts steps and tokens, and keeps moving averages; engine thread only."""

    num_steps: int = 0
    num_failed_steps: int = 0
    num_preemptions: int = 0
    num_spills: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_finished: int = 0
    num_drafts: int = 0
    num_drafts_held: int = 0
    prefill_step_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    overhead_s: float = 0.0
    prefill_rate: Rate = field(default_factory=Rate)

    def count_drafts(self, num_drafts: int, num_held: int) -> None:
        """Count guessed tokens; each that held was decoded without a step of its own."""
        self.num_drafts += num_drafts
        self.num_drafts_held += num_held
        self.num_decode_tokens += num_held

    def count_step(self, num_tokens: int, num_decode: int, step_s: float, model_s: float) -> None:
        """Count one step of `num_tokens` tokens, `num_decode` of which were decode rows."""
        self.num_steps += 1
        self.num_decode_tokens += num_decode
        self.num_prefill_tokens += num_tokens - num_decode
        self.overhead_s = _moved(self.overhead_s, step_s - model_s)
        if num_tokens > num_decode:
            self.prefill_rate.add(num_tokens - num_decode, step_s)
            self.prefill_step_s = _moved(self.prefill_step_s, step_s)
        else:
            self.decode_step_s = _moved(self.decode_step_s, step_s)
            self.decode_tokens_per_s = _moved(self.decode_tokens_per_s, num_decode / step_s)

    def snapshot(
        self, scheduler: Scheduler, flow: BlockFlow, blocks: BlockPool, mover: KvMover
    ) -> EngineStats:
        """The state of these parts now, with the counters."""
        return EngineStats(
            waiting=scheduler.num_waiting,
            loading=scheduler.num_loading,
            running=scheduler.num_running,
            storing=flow.num_handing_over,
            free_blocks=blocks.num_free,
            cached_blocks=blocks.num_cached,
            used_blocks=blocks.num_used,
            total_blocks=blocks.num_total,
            cold_blocks=scheduler.num_cold_blocks,
            num_steps=self.num_steps,
            num_failed_steps=self.num_failed_steps,
            num_preemptions=self.num_preemptions,
            num_spills=self.num_spills,
            num_prefill_tokens=self.num_prefill_tokens,
            num_decode_tokens=self.num_decode_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_finished=self.num_finished,
            num_drafts=self.num_drafts,
            num_drafts_held=self.num_drafts_held,
            prefill_tokens_per_s=self.prefill_rate.per_s,
            prefill_step_s=self.prefill_step_s,
            decode_tokens_per_s=self.decode_tokens_per_s,
            decode_step_s=self.decode_step_s,
            overhead_s=self.overhead_s,
            mover=mover.stats(),
        )


def tier_loads(mover: MoverStats) -> dict[str, TierLoads]:
    """What loads got from each tier: NVMe up to DRAM, and from DRAM into HBM."""
    promotion_s = mover.promotion_s
    copies = TierLoads(
        num_bytes=mover.num_loaded_bytes, seconds=max(mover.load_busy_s - promotion_s, 0.0)
    )
    promotions = TierLoads(num_bytes=mover.num_promoted_bytes, seconds=promotion_s)
    return {"dram": copies, "nvme": promotions}


def _moved(average: float, value: float) -> float:
    return value if average == 0.0 else average + _WEIGHT * (value - average)
