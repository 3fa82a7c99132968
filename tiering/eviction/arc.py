"""ARC: recency and frequency in the shares that the last misses ask for.

Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003. Seen once: T1;
seen more often: T2; B1 and B2 remember the keys that left either of them for room.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

_Keys = OrderedDict[bytes, None]


class ArcEvictor:
    """Adaptive replacement over `num_slots` blocks; every call is O(1), victims O(count).

    Two things differ from the paper, because kvd makes room before it knows what for: the target
    moves after the eviction that a returning block caused, and a leased block (a hit) counts as
    a member of T2.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = max(num_slots, 1)
        self._t1_target = 0
        self._t1: _Keys = OrderedDict()
        self._t2: _Keys = OrderedDict()
        self._leased: set[bytes] = set()
        self._b1: _Keys = OrderedDict()
        self._b2: _Keys = OrderedDict()

    def admit(self, key: bytes) -> None:
        """Put a new block into T1, every other into T2."""
        t2 = self._t2
        if key in t2:
            t2.move_to_end(key)
        elif key in self._t1:
            del self._t1[key]
            t2[key] = None
        elif key in self._leased:
            self._leased.remove(key)
            t2[key] = None
        elif key in self._b1 or key in self._b2:
            self._adapt(key)
            t2[key] = None
        else:
            self._t1[key] = None
            self._trim_ghosts()

    def withdraw(self, key: bytes) -> None:
        """Set the block aside; it comes back into T2."""
        if key in self._t1:
            del self._t1[key]
        elif key in self._t2:
            del self._t2[key]
        else:
            return
        self._leased.add(key)

    def remove(self, key: bytes, *, is_evicted: bool) -> None:
        """Forget the block, but remember the key of one that went for room."""
        if key in self._t1:
            del self._t1[key]
            if is_evicted:
                self._b1[key] = None
        elif key in self._t2 or key in self._leased:
            self._t2.pop(key, None)
            self._leased.discard(key)
            if is_evicted:
                self._b2[key] = None

    def next_victims(self, count: int) -> list[bytes]:
        """From the old end of T1 while it is above its target, else from that of T2."""
        if count == 1:
            over = self._t1 if len(self._t1) > self._t1_target or not self._t2 else self._t2
            return list(islice(over, 1))
        t1, t2 = iter(self._t1), iter(self._t2)
        num_t1, num_t2 = len(self._t1), len(self._t2)
        victims: list[bytes] = []
        while len(victims) < count and num_t1 + num_t2:
            if num_t1 and (num_t1 > self._t1_target or not num_t2):
                victims.append(next(t1))
                num_t1 -= 1
            else:
                victims.append(next(t2))
                num_t2 -= 1
        return victims

    def find_expired(self, now_s: float) -> list[bytes]:
        """None: age alone is no reason."""
        return []

    def __len__(self) -> int:
        """Number of evictable blocks."""
        return len(self._t1) + len(self._t2)

    def _adapt(self, key: bytes) -> None:
        """A key came back from a ghost list: the list it had been in was too short."""
        num_b1, num_b2 = len(self._b1), len(self._b2)
        if key in self._b1:
            step = max(1, num_b2 // num_b1)
            self._t1_target = min(self._num_slots, self._t1_target + step)
            del self._b1[key]
        else:
            step = max(1, num_b1 // num_b2)
            self._t1_target = max(0, self._t1_target - step)
            del self._b2[key]

    def _trim_ghosts(self) -> None:
        """T1 and B1 together remember `num_slots` keys, all four lists twice as many."""
        num_t1 = len(self._t1)
        while self._b1 and num_t1 + len(self._b1) > self._num_slots:
            self._b1.popitem(last=False)
        num_known = num_t1 + len(self._b1) + len(self._t2) + len(self._leased)
        while self._b2 and num_known + len(self._b2) > 2 * self._num_slots:
            self._b2.popitem(last=False)
