"""Load or recompute: what bringing cached blocks costs against computing their tokens again.

A load of n tokens takes t0 + n*b/B, a recompute n/r: the load wins only if B > r*b, and only for runs
longer than t0*r / (1 - r*b/B). All four are measured as we go; the time is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from pipeline.protocol.cache_use import LoadReason

_KEPT = 0.9  # of the past, at each measurement
_PROBE_AFTER_S = 30.0
_UNMEASURED_LIMIT_S = 2.0
_SLACK, _LEAST_SLACK_S = 3.0, 0.15
_HEARSAY_S = 0.05  # what a rate that others measured weighs: our own soon outweigh it


class LoadPolicy(StrEnum):
    """When cached blocks below HBM are loaded: by COST, ALWAYS or NEVER."""

    COST = "cost"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(slots=True)
class Rate:
    """Amount per second over the last measurements, large ones weighing as much as they took."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Count one measurement, of nothing too; it counts for nothing if it took no time."""
        if seconds > 0:
            self.amount = _KEPT * self.amount + amount
            self.seconds = _KEPT * self.seconds + seconds

    @property
    def is_measured(self) -> bool:
        """There was a measurement."""
        return self.seconds > 0

    @property
    def per_s(self) -> float:
        """0 before the first measurement."""
        return self.amount / self.seconds if self.seconds else 0.0


class Run(NamedTuple):
    """A head run of cached tokens: so many in DRAM, then so many that NVMe would give."""

    dram_tokens: int
    nvme_tokens: int

    @property
    def num_tokens(self) -> int:
        """Both together."""
        return self.dram_tokens + self.nvme_tokens


class Choice(NamedTuple):
    """Load `num_tokens` (0: recompute all), for `reason`, and give up after `limit_s` seconds.

    Predicted seconds of what was weighed, to load it and to compute it; 0 where nothing was.
    """

    num_tokens: int
    reason: LoadReason
    limit_s: float
    load_s: float = 0.0
    compute_s: float = 0.0


@dataclass(slots=True)
class TransferCost:
    """Measured rates of one worker's loads, and the decisions that follow from them.

    token_bytes: KV bytes of one token. `fixed_s` is the cost of a load that has no bytes.
    """

    token_bytes: float
    policy: LoadPolicy = LoadPolicy.COST
    fixed_s: float = 0.0
    _dram: Rate = field(default_factory=Rate)
    _nvme: Rate = field(default_factory=Rate)
    _measured_s: float = 0.0

    def expect(self, bytes_per_s: float, fixed_s: float, now_s: float) -> None:
        """Begin with what somebody else measured; nothing after the first measurement of our own."""
        if not self._measured_s:
            self._dram.add(bytes_per_s * _HEARSAY_S, _HEARSAY_S)
            self.fixed_s = fixed_s
            self._measured_s = now_s

    def count_copy(self, num_bytes: int, seconds: float, fixed_s: float, now_s: float) -> None:
        """A load copied so much out of DRAM; `fixed_s` is what it took beside that."""
        if num_bytes:
            self._dram.add(num_bytes, seconds)
        self.fixed_s = (
            fixed_s if not self._measured_s else self.fixed_s + 0.1 * (fixed_s - self.fixed_s)
        )
        self._measured_s = now_s

    def count_promotion(self, num_bytes: int, seconds: float) -> None:
        """NVMe gave so much to DRAM."""
        self._nvme.add(num_bytes, seconds)

    def load_s(self, run: Run) -> float:
        """Predicted seconds to load a run; infinite where nothing ever came."""
        dram, nvme = self._dram.per_s, self._nvme.per_s
        if not dram or (run.nvme_tokens and not nvme):
            return float("inf")
        promotion_s = run.nvme_tokens * self.token_bytes / nvme if run.nvme_tokens else 0.0
        return self.fixed_s + promotion_s + run.num_tokens * self.token_bytes / dram

    def choose(self, run: Run, prefill_tokens_per_s: float, now_s: float) -> Choice:
        """What to load of a run: all of it, its part in DRAM, or nothing."""
        if not run.num_tokens:
            return Choice(0, LoadReason.ABSENT, 0.0)
        if self.policy is LoadPolicy.NEVER:
            return Choice(0, LoadReason.NEVER, 0.0)
        if self.policy is LoadPolicy.ALWAYS:
            return Choice(run.num_tokens, LoadReason.ALWAYS, _UNMEASURED_LIMIT_S)
        is_measured = self._dram.is_measured and (self._nvme.is_measured or not run.nvme_tokens)
        if not prefill_tokens_per_s or not is_measured:
            return Choice(run.num_tokens, LoadReason.UNMEASURED, _UNMEASURED_LIMIT_S)
        if now_s - self._measured_s > _PROBE_AFTER_S:
            return Choice(run.num_tokens, LoadReason.PROBE, _UNMEASURED_LIMIT_S)
        return self._cheapest((run, Run(run.dram_tokens, 0)), prefill_tokens_per_s)

    def _cheapest(self, runs: Sequence[Run], prefill_tokens_per_s: float) -> Choice:
        def saved_s(run: Run) -> float:
            return run.num_tokens / prefill_tokens_per_s - self.load_s(run)

        best = max((run for run in runs if run.num_tokens), key=saved_s)
        load_s, compute_s = self.load_s(best), best.num_tokens / prefill_tokens_per_s
        if load_s < compute_s:
            limit_s = _limit_s(load_s, compute_s)
            return Choice(best.num_tokens, LoadReason.FASTER, limit_s, load_s, compute_s)
        per_token_s = (load_s - self.fixed_s) / best.num_tokens
        is_slow = per_token_s * prefill_tokens_per_s >= 1
        reason = LoadReason.SLOW_LINK if is_slow else LoadReason.TOO_SHORT
        return Choice(0, reason, 0.0, load_s, compute_s)


def _limit_s(load_s: float, compute_s: float) -> float:
    """A load that takes this long is late: a few times its prediction, and time for a hiccup.

    And at least as long as computing would take: who gives up before that throws away what would
    come in a moment, who waits no longer loses at most as much again. Only a store that hangs is
    not waited for beyond the limit of an unmeasured one.
    """
    return max(_SLACK * load_s, _LEAST_SLACK_S, min(compute_s, _UNMEASURED_LIMIT_S))
