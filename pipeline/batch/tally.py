"""What a running batch has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Counts of one run. Times are seconds of the monotonic clock.

    `num_done` and `num_failed` are lines written in this run, `num_skipped` those of earlier ones.
    """

    num_requests: int
    num_skipped: int
    started_s: float
    num_done: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    waiting_for: str = ""

    @property
    def num_ended(self) -> int:
        """All lines that need no more work."""
        return self.num_skipped + self.num_done + self.num_failed

    def tokens_per_s(self, now_s: float) -> float:
        """Generated tokens over the time of this run."""
        return self.num_tokens / max(now_s - self.started_s, 1e-6)

    def remaining_s(self, now_s: float) -> float | None:
        """How long the rest takes at this run's pace; None before the first line ended."""
        num_ended = self.num_done + self.num_failed
        if num_ended == 0:
            return None
        pace_s = (now_s - self.started_s) / num_ended
        return pace_s * (self.num_requests - self.num_ended)
