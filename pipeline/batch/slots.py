"""How many lines may be in flight at once, over all batches."""

from __future__ import annotations

import asyncio
from collections import deque

from pipeline.scheduling.fleet import Fleet

# Free places are filled twice over, so that a worker finds the next line waiting when one ends.
FILL_FACTOR = 2


def wanted_window(fleet: Fleet, num_own_running: int, max_window: int) -> int:
    """About twice the places that are free or held by our own lines; at least one.

    `num_own_running` are lines that produce tokens now. Heartbeats are up to a second old, so this is
    an estimate. Without a decode worker nothing is sent that could only wait.
    """
    workers = [worker for worker in fleet.usable() if worker.can_decode]
    if not workers:
        return 0
    capacity = sum(worker.capacity for worker in workers)
    num_busy = sum(worker.num_running + worker.num_waiting for worker in workers)
    num_foreign = max(0, num_busy - num_own_running)
    return min(max(1, FILL_FACTOR * (capacity - num_foreign)), max_window)


class Slots:
    """A semaphore whose limit moves; first come, first served. For one event loop."""

    def __init__(self) -> None:
        self._limit = 0
        self._num_taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def num_taken(self) -> int:
        """Lines in flight."""
        return self._num_taken

    def set_limit(self, limit: int) -> None:
        """Let so many be taken at once; those over a lower limit run on."""
        self._limit = limit
        self._let_in()

    def ask(self) -> asyncio.Future[None]:
        """A turn: done when the slot is taken. Every turn ends in `give_back` or `withdraw`."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._let_in()
        return turn

    def withdraw(self, turn: asyncio.Future[None]) -> None:
        """Give up a turn, whether its slot was taken or not."""
        if turn.done():
            self.give_back()
        else:
            turn.cancel()

    def give_back(self) -> None:
        """Free a slot that was taken."""
        self._num_taken -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._num_taken < self._limit:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._num_taken += 1
