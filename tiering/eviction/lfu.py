"""Least frequently used goes first; in LFUDA what was frequent long ago counts less."""

from __future__ import annotations

from collections import OrderedDict

from tiering.eviction.priority_queues import PriorityQueues

_MAX_FREQUENCY = 255  # what is used more often than this goes by recency
_LEAST_MEMORY = 1 << 16
_MEMORY_PER_SLOT = 8


class LfuEvictor:
    """Fewest uses first, then least recently used; every call is O(1), victims O(count).

    Uses are remembered for blocks that went for room, for eight times `num_slots` keys and at least
    65,536: without that memory a block that returns competes as if it were new.
    """

    def __init__(self, num_slots: int) -> None:
        self._max_remembered = max(_LEAST_MEMORY, _MEMORY_PER_SLOT * num_slots)
        self._uses: dict[bytes, int] = {}
        self._remembered: OrderedDict[bytes, int] = OrderedDict()
        self._queues = PriorityQueues()

    def admit(self, key: bytes) -> None:
        """Count a use."""
        uses = self._uses.get(key)
        if uses is None:
            uses = self._remembered.pop(key, 0)
        uses = min(uses + 1, _MAX_FREQUENCY)
        self._uses[key] = uses
        self._queues.put(key, uses)

    def withdraw(self, key: bytes) -> None:
        """Set the block aside with its uses."""
        self._queues.take(key)

    def remove(self, key: bytes, *, is_evicted: bool) -> None:
        """Forget the block, but remember the uses of one that went for room."""
        self._queues.take(key)
        uses = self._uses.pop(key, None)
        if uses is not None and is_evicted:
            self._remembered[key] = uses
            if len(self._remembered) > self._max_remembered:
                self._remembered.popitem(last=False)

    def next_victims(self, count: int) -> list[bytes]:
        """Fewest uses first."""
        return self._queues.first(count)

    def find_expired(self, now_s: float) -> list[bytes]:
        """None: age alone is no reason."""
        return []

    def __len__(self) -> int:
        """Number of evictable blocks."""
        return len(self._queues)


class LfudaEvictor:
    """LFU with dynamic aging; every call is O(1), victims O(count).

    A block's priority is its uses plus the priority of the last victim, so that old fame fades
    (Arlitt et al., "Evaluating content management techniques for web proxy caches", 2000).
    """

    def __init__(self, num_slots: int = 0) -> None:
        self._num_slots = num_slots
        self._age = 0
        self._uses: dict[bytes, int] = {}
        self._queues = PriorityQueues()

    def admit(self, key: bytes) -> None:
        """Count a use, and lift the block above the present age."""
        uses = min(self._uses.get(key, 0) + 1, _MAX_FREQUENCY)
        self._uses[key] = uses
        self._queues.put(key, uses + self._age)

    def withdraw(self, key: bytes) -> None:
        """Set the block aside with its uses."""
        self._queues.take(key)

    def remove(self, key: bytes, *, is_evicted: bool) -> None:
        """Forget the block; one that went for room makes all others older."""
        lowest = self._queues.lowest()
        if is_evicted and lowest is not None:
            self._age = max(self._age, lowest)
        self._queues.take(key)
        self._uses.pop(key, None)

    def next_victims(self, count: int) -> list[bytes]:
        """Lowest priority first."""
        return self._queues.first(count)

    def find_expired(self, now_s: float) -> list[bytes]:
        """None: age alone is no reason."""
        return []

    def __len__(self) -> int:
        """Number of evictable blocks."""
        return len(self._queues)
