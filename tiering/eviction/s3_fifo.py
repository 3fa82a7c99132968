"""S3-FIFO: three queues and no promotion on a hit.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. New blocks pass a small
queue; those used meanwhile move on to the main queue; a ghost queue lets returning ones in there.
"""

from __future__ import annotations

from collections import OrderedDict, deque

_MAX_FREQUENCY = 3
_SMALL_SHARE = 10  # one tenth of the slots

_Queue = OrderedDict[bytes, int]  # key -> hits that still count


class S3FifoEvictor:
    """S3-FIFO over `num_slots` blocks; every call is O(1) amortised, victims O(count) amortised.

    The hand moves for good when a block is evicted; a proposal only looks ahead, so the blocks that
    it passes over are passed at most twice, and each of them is paid for by a hit. A leased block
    comes back at the young end of its queue.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = max(num_slots, 1)
        self._num_small = max(1, num_slots // _SMALL_SHARE)
        self._small: _Queue = OrderedDict()
        self._main: _Queue = OrderedDict()
        self._leased: dict[bytes, tuple[_Queue, int]] = {}
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def admit(self, key: bytes) -> None:
        """Count a hit, or queue a new block: a ghost in the main queue, others in the small one."""
        if key in self._small:
            self._small[key] = min(_MAX_FREQUENCY, self._small[key] + 1)
        elif key in self._main:
            self._main[key] = min(_MAX_FREQUENCY, self._main[key] + 1)
        elif key in self._leased:
            queue, frequency = self._leased.pop(key)
            queue[key] = min(_MAX_FREQUENCY, frequency + 1)
        elif key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def withdraw(self, key: bytes) -> None:
        """Set the block aside with its hits."""
        for queue in (self._small, self._main):
            frequency = queue.pop(key, None)
            if frequency is not None:
                self._leased[key] = (queue, frequency)

    def remove(self, key: bytes, *, is_evicted: bool) -> None:
        """Forget the block; one that went for room from the small queue becomes a ghost."""
        if is_evicted:
            self._move_hand()
        is_small = self._small.pop(key, None) is not None
        self._main.pop(key, None)
        self._leased.pop(key, None)
        if is_small and is_evicted:
            self._ghosts[key] = None
            if len(self._ghosts) > self._num_slots:
                self._ghosts.popitem(last=False)

    def next_victims(self, count: int) -> list[bytes]:
        """Look ahead with the hand, as far as `count` victims."""
        small, main = iter(self._small.items()), iter(self._main.items())
        num_small, num_main = len(self._small), len(self._main)
        moved: deque[tuple[bytes, int]] = deque()  # behind the end of the main queue
        victims: list[bytes] = []
        while len(victims) < count and num_small + num_main:
            if num_small and (num_small >= self._num_small or not num_main):
                key, frequency = next(small)
                num_small -= 1
                rest = 0 if frequency > 1 else -1
            else:
                key, frequency = next(main, None) or moved.popleft()
                num_main -= 1
                rest = frequency - 1
            if rest < 0:
                victims.append(key)
            else:
                moved.append((key, rest))
                num_main += 1
        return victims

    def find_expired(self, now_s: float) -> list[bytes]:
        """None: age alone is no reason."""
        return []

    def __len__(self) -> int:
        """Number of evictable blocks."""
        return len(self._small) + len(self._main)

    def _move_hand(self) -> None:
        """Move on what is not to go, until a block that is lies under the hand."""
        small, main = self._small, self._main
        while small or main:
            if small and (len(small) >= self._num_small or not main):
                key, frequency = next(iter(small.items()))
                if frequency <= 1:
                    return
                del small[key]
                main[key] = 0
            else:
                key, frequency = next(iter(main.items()))
                if not frequency:
                    return
                main[key] = frequency - 1
                main.move_to_end(key)
