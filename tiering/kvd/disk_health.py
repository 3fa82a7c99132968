"""What a disk may still be trusted with, by what it did lately."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import structlog

log = structlog.get_logger(__name__)

_MAX_ERRORS_IN_A_ROW = 8
_MAX_SLOW_IN_A_ROW = 4
_LONGEST_RETRY_PAUSES = 16


class NvmeHealth(StrEnum):
    """OFF serves nothing, READ_ONLY takes no more blocks; both are tried again after a pause."""

    ON = "on"
    READ_ONLY = "read_only"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """When a disk is given up for a while.

    `retry_s`: first pause; it doubles, up to sixteenfold, each time the disk fails again at once.
    `slow_io_s`: a call that takes longer is slow; four in a row mean that recomputing is faster.
    """

    retry_s: float = 30.0
    slow_io_s: float = 0.5


class DiskHealth:
    """One refused write or slow writes: READ_ONLY. Reads that keep failing, or a hang: OFF."""

    def __init__(self, limits: DiskLimits) -> None:
        self._limits = limits
        self.level = NvmeHealth.ON
        self.num_errors = 0
        self._num_errors_in_a_row = 0
        self._num_slow_writes = 0
        self._num_slow_reads = 0
        self._pause_s = limits.retry_s
        self._retry_at_s = 0.0

    def give_up(self) -> None:
        """There is no disk, and none is expected."""
        self.level = NvmeHealth.OFF
        self._retry_at_s = float("inf")

    def refuse_writes(self, doing: str, error: OSError, now_s: float) -> None:
        """The disk refused a write."""
        self.num_errors += 1
        self._degrade(NvmeHealth.READ_ONLY, doing, str(error), now_s)

    def turn_off(self, doing: str, error: OSError, now_s: float) -> None:
        """The disk is of no use at all."""
        self.num_errors += self.level is not NvmeHealth.OFF
        self._degrade(NvmeHealth.OFF, doing, str(error), now_s)

    def count_read_error(self, error: OSError, now_s: float) -> None:
        """One read failed: its block is a miss, and too many of them in a row are the end."""
        self.num_errors += 1
        self._num_errors_in_a_row += 1
        if self._num_errors_in_a_row >= _MAX_ERRORS_IN_A_ROW:
            self._degrade(NvmeHealth.OFF, "read", str(error), now_s)

    def note_read(self, took_s: float, now_s: float) -> None:
        """A read came back."""
        self._num_errors_in_a_row = 0
        self._num_slow_reads = self._num_slow_reads + 1 if took_s > self._limits.slow_io_s else 0
        if self._num_slow_reads >= _MAX_SLOW_IN_A_ROW:
            self._degrade(NvmeHealth.OFF, "read", f"slow: {took_s:.2f} s", now_s)

    def note_write(self, took_s: float, now_s: float) -> None:
        """A write came back."""
        self._num_slow_writes = self._num_slow_writes + 1 if took_s > self._limits.slow_io_s else 0
        if self._num_slow_writes >= _MAX_SLOW_IN_A_ROW:
            self._degrade(NvmeHealth.READ_ONLY, "write", f"slow: {took_s:.2f} s", now_s)
        elif not self._num_slow_writes:
            self._pause_s = self._limits.retry_s  # it works again

    def retry(self, now_s: float) -> bool:
        """Trust the disk again if its pause is over; True when that was done."""
        if self.level is NvmeHealth.ON or now_s < self._retry_at_s:
            return False
        log.info("nvme_retried", health=self.level.value)
        self.level = NvmeHealth.ON
        self._num_errors_in_a_row = self._num_slow_reads = self._num_slow_writes = 0
        return True

    def _degrade(self, level: NvmeHealth, doing: str, reason: str, now_s: float) -> None:
        if self.level in (level, NvmeHealth.OFF):
            return  # said once
        self.level = level
        self._retry_at_s = now_s + self._pause_s
        log.warning(
            "nvme_degraded",
            health=level.value,
            doing=doing,
            error=reason,
            retry_s=self._pause_s,
        )
        longest_s = self._limits.retry_s * _LONGEST_RETRY_PAUSES
        self._pause_s = min(2 * self._pause_s, longest_s)
