"""Least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice


class LruEvictor:
    """Plain LRU; every call is O(1), victims O(count).

    The directory ends a run's lease tail first, so of one run the tail goes before its head.
    """

    def __init__(self, num_slots: int = 0) -> None:
        self._num_slots = num_slots
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def admit(self, key: bytes) -> None:
        """Put the block at the young end."""
        order = self._order
        if key in order:
            order.move_to_end(key)
        else:
            order[key] = None

    def withdraw(self, key: bytes) -> None:
        """Forget the block."""
        self._order.pop(key, None)

    def remove(self, key: bytes, *, is_evicted: bool) -> None:
        """Forget the block, however it left."""
        self._order.pop(key, None)

    def next_victims(self, count: int) -> list[bytes]:
        """The `count` oldest, oldest first."""
        return list(islice(self._order, count))

    def find_expired(self, now_s: float) -> list[bytes]:
        """None: age alone is no reason."""
        return []

    def __len__(self) -> int:
        """Number of evictable blocks."""
        return len(self._order)
