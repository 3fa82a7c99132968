"""What runs out, in order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from enum import Enum, auto
from itertools import count


class TimerKind(Enum):
    """What a timer ends."""

    LEASE = auto()
    RESERVATION = auto()
    LIFETIME = auto()


class Timers:
    """Deadlines of one directory; whoever takes a due one checks whether it still means anything."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TimerKind, int, int]] = []
        self._order = count()

    def start(self, deadline_s: float, kind: TimerKind, ident: int, generation: int = 0) -> None:
        """Remember a lease id, or a slot and its generation, until `deadline_s`."""
        heapq.heappush(self._heap, (deadline_s, next(self._order), kind, ident, generation))

    def pop_due(self, now_s: float) -> Iterator[tuple[TimerKind, int, int]]:
        """Take out what is due at `now_s`, earliest first: kind, ident, generation."""
        while self._heap and self._heap[0][0] <= now_s:
            _, _, kind, ident, generation = heapq.heappop(self._heap)
            yield kind, ident, generation
