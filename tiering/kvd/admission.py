"""Which blocks are worth a write to the NVMe tier when writes are dear."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import structlog

log = structlog.get_logger(__name__)

_DAY_S = 86_400.0
_MIN_OCCUPANCY = 0.9
_CALM_WRITES_PER_HIT = 1.5
_MIN_USES = 2
_GHOSTS_PER_SLOT = 4


class WriteBudget:
    """A day's worth of bytes that refills as the day goes by; None is without limit."""

    def __init__(self, bytes_per_day: int | None, now_s: float) -> None:
        self._bytes_per_day = bytes_per_day
        self._left_bytes = float(bytes_per_day or 0)
        self._seen_s = now_s

    def has(self, num_bytes: int, now_s: float) -> bool:
        """So many bytes may still be written."""
        self._refill(now_s)
        return self._bytes_per_day is None or self._left_bytes >= num_bytes

    def is_short(self, now_s: float) -> bool:
        """More than half of it is gone: only the best blocks should get the rest."""
        self._refill(now_s)
        return self._bytes_per_day is not None and self._left_bytes < self._bytes_per_day / 2

    def spend(self, num_bytes: int) -> None:
        """So many bytes were written."""
        self._left_bytes -= num_bytes

    def _refill(self, now_s: float) -> None:
        if self._bytes_per_day is not None:
            gained = self._bytes_per_day * (now_s - self._seen_s) / _DAY_S
            self._left_bytes = min(self._left_bytes + gained, self._bytes_per_day)
        self._seen_s = now_s


@dataclass(frozen=True, slots=True)
class WritePressure:
    """What the filter goes by."""

    occupancy: float
    is_budget_short: bool


class AdmissionFilter:
    """Lets every block pass until the tier is full and its writes bring too few hits.

    While it is on, a block passes that was used at least twice in DRAM, or that was turned away
    before and is offered again. On the published traces this cuts writes four- to sixfold, for
    nothing where the tier is small and for 7-11 points of hit rate where it is large (notes/kv.md
    section 4): hence only under pressure. Writes and hits count for about one turn-over of the tier.
    """

    def __init__(self, num_slots: int, max_writes_per_hit: float) -> None:
        self._num_slots = max(num_slots, 1)
        self._max_writes_per_hit = max_writes_per_hit
        self._num_writes = 0.0
        self._num_hits = 0.0
        self._turned_away: OrderedDict[bytes, None] = OrderedDict()
        self.is_on = False

    def count_write(self) -> None:
        """One block was written."""
        self._num_writes += 1
        if self._num_writes >= self._num_slots:
            self._num_writes /= 2
            self._num_hits /= 2

    def count_hit(self) -> None:
        """One block was read for a holder."""
        self._num_hits += 1

    def admits(self, key: bytes, num_uses: int, pressure: WritePressure) -> bool:
        """Whether a block should be written; remembers those that should not."""
        self._switch(pressure)
        if not self.is_on or num_uses >= _MIN_USES or key in self._turned_away:
            self._turned_away.pop(key, None)
            return True
        self._turned_away[key] = None
        if len(self._turned_away) > _GHOSTS_PER_SLOT * self._num_slots:
            self._turned_away.popitem(last=False)
        return False

    def _switch(self, pressure: WritePressure) -> None:
        """On above the limit, off only well below it, so that it does not flutter."""
        limit = _CALM_WRITES_PER_HIT if self.is_on else self._max_writes_per_hit
        is_wasteful = (
            pressure.occupancy > _MIN_OCCUPANCY
            and self._num_writes >= self._num_slots / 4
            and self._num_writes > limit * self._num_hits
        )
        is_on = is_wasteful or pressure.is_budget_short
        if is_on is not self.is_on:
            self.is_on = is_on
            log.info("nvme_admission_filter", is_on=is_on)
