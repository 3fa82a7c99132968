"""How many lines may be in flight at once, over all batches of a model."""

from __future__ import annotations

import asyncio
from collections import deque

from pipeline.scheduling.fleet import Fleet

# Free places are filled twice over, so that a worker finds the next line waiting when one ends.
FILL_FACTOR = 2
UNKNOWN_LINES = 8


def wanted_window(fleet: Fleet, num_own_running: int, max_window: int) -> int:
    """About twice the places that are free or held by our own lines; at least one.

    `fleet` are the workers of one model, `num_own_running` its lines that produce tokens now.
    Heartbeats are up to a second old, so this is an estimate. Without a decode worker nothing is
    sent that could only wait.
    """
    workers = [worker for worker in fleet.usable() if worker.can_decode]
    if not workers:
        return 0
    capacity = sum(worker.capacity for worker in workers)
    num_busy = sum(worker.num_running + worker.num_waiting for worker in workers)
    num_foreign = max(0, num_busy - num_own_running)
    return min(max(1, FILL_FACTOR * (capacity - num_foreign)), max_window)


class SlotBook:
    """The slots of each model, by its slug: a model that is jammed holds the lines of no other.

    Lines of a model that nobody knows are refused when they run; a few may at once.
    """

    def __init__(self) -> None:
        self._slots: dict[str, Slots] = {}
        self._unknown = Slots()
        self._unknown.set_limit(UNKNOWN_LINES)

    def of(self, slug: str | None) -> Slots:
        """A model's; None: nobody knows the model."""
        if slug is None:
            return self._unknown
        return self._slots.setdefault(slug, Slots())

    @property
    def slugs(self) -> list[str]:
        """Models that lines have asked for."""
        return list(self._slots)

    @property
    def num_taken(self) -> int:
        """Lines in flight."""
        return sum(slots.num_taken for slots in (*self._slots.values(), self._unknown))


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
