"""Stopping without cutting anybody off: first no new work, then the end of the old, then the end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.http_errors import Draining

# After the deadline streams write their error event; this is the time for it.
LAST_WORDS_S = 1.0


class Drain:
    """State of the stop. `begin` may be called from a signal handler."""

    def __init__(self, drain_s: float) -> None:
        self._drain_s = drain_s
        self._began_s: float | None = None
        self._num_active = 0
        self.deadline = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """True from the first signal on."""
        return self._began_s is not None

    def begin(self, now_s: float) -> None:
        """Take no new work from now on."""
        if self._began_s is None:
            self._began_s = now_s

    def refuse_new_work(self) -> None:
        """To be called before work is taken.

        Raises:
            Draining: the stop has begun.
        """
        if self.is_draining:
            raise Draining

    @contextmanager
    def active(self) -> Iterator[None]:
        """Work that a stop waits for."""
        self._num_active += 1
        try:
            yield
        finally:
            self._num_active -= 1

    def advance(self, now_s: float) -> bool:
        """Set `deadline` when the time is over; True when the process may end."""
        if self._began_s is None:
            return False
        if self._num_active == 0:
            return True
        over_s = now_s - self._began_s - self._drain_s
        if over_s >= 0:
            self.deadline.set()
        return over_s >= LAST_WORDS_S
