"""Least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice


class LruEvictor:
    """Plain LRU; admit and withdraw are O(1), victims O(count)."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def admit(self, key: bytes) -> None:
        """Put the block at the young end."""
        self._order[key] = None
        self._order.move_to_end(key)

    def withdraw(self, key: bytes) -> None:
        """Forget the block."""
        self._order.pop(key, None)

    def next_victims(self, count: int) -> list[bytes]:
        """The `count` oldest, oldest first."""
        return list(islice(self._order, count))

    def __len__(self) -> int:
        """Number of evictable blocks."""
        return len(self._order)
