"""How long to wait before a part that died is started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Delays that double from `first_s` to `limit_s`; a life of `reset_after_s` starts them anew."""

    first_s: float = 0.5
    limit_s: float = 30.0
    reset_after_s: float = 60.0
    num_short_lives: int = 0

    def next_delay_s(self, lived_s: float) -> float:
        """Record a death after `lived_s` seconds of life and return the wait before the restart."""
        if lived_s >= self.reset_after_s:
            self.num_short_lives = 0
        delay_s = min(self.limit_s, self.first_s * 2.0 ** min(self.num_short_lives, 30))
        self.num_short_lives += 1
        return delay_s
