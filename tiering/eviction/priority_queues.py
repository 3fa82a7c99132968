"""Keys in first-in-first-out queues, one for each small whole-number priority."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

_SLACK_BITS = 1024


class PriorityQueues:
    """Lowest priority first, then oldest first.

    A bit mask says which priorities have a queue, so that the lowest is found without a search
    while priorities lie within some hundreds of each other. None is ever put below the lowest one
    that `lowest` gave.
    """

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[bytes, None]] = {}
        self._priorities: dict[bytes, int] = {}
        self._mask = 0
        self._floor = 0  # priority of the mask's lowest bit

    def put(self, key: bytes, priority: int) -> None:
        """Put a key at the young end of a priority's queue; it leaves the one it was in."""
        old_priority = self._priorities.get(key)
        if old_priority == priority:
            self._queues[priority].move_to_end(key)
            return
        if old_priority is not None:
            self._leave(key, old_priority)
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = OrderedDict()
            self._mask |= 1 << (priority - self._floor)
        queue[key] = None
        self._priorities[key] = priority

    def take(self, key: bytes) -> bool:
        """Take a key out; False when it is not here."""
        priority = self._priorities.pop(key, None)
        if priority is None:
            return False
        self._leave(key, priority)
        return True

    def lowest(self) -> int | None:
        """The lowest priority of any key; None without keys."""
        if not self._mask:
            return None
        num_bits = (self._mask & -self._mask).bit_length() - 1
        if num_bits > _SLACK_BITS:
            self._mask >>= num_bits
            self._floor += num_bits
            num_bits = 0
        return self._floor + num_bits

    def first(self, count: int) -> list[bytes]:
        """Up to `count` keys in order; changes nothing."""
        keys: list[bytes] = []
        mask = self._mask
        while mask and len(keys) < count:
            bit = mask & -mask
            queue = self._queues[self._floor + bit.bit_length() - 1]
            keys += islice(queue, count - len(keys))
            mask ^= bit
        return keys

    def __contains__(self, key: bytes) -> bool:
        """The key is in a queue."""
        return key in self._priorities

    def __len__(self) -> int:
        """Number of keys."""
        return len(self._priorities)

    def _leave(self, key: bytes, priority: int) -> None:
        queue = self._queues[priority]
        del queue[key]
        if not queue:
            del self._queues[priority]
            self._mask ^= 1 << (priority - self._floor)
