"""Which of a tier's blocks go next: those with a lifetime, those of greedy tenants, the rest."""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import islice

from tiering.eviction.evictor import NewEvictor
from tiering.eviction.lru import LruEvictor

NO_OWNER = b""
_NUM_OWNERS_SHOWN = 50
_NOTHING: OrderedDict[bytes, None] = OrderedDict()


class EvictionOrder:
    """Evictors of one tier with `num_slots` slots, by what they hold.

    `new_evictor` makes the one for ordinary blocks; blocks with a lifetime have their own and go
    first. With `tenant_share`, an owner with more than that share of the slots in use loses its own
    least recently used blocks before anybody else loses one. Shares that together stay under the
    tier's low watermark are safe from every flood. Blocks of NO_OWNER are nobody's flood.
    """

    def __init__(
        self, num_slots: int, new_evictor: NewEvictor, tenant_share: float | None = None
    ) -> None:
        self._lasting = new_evictor(num_slots)
        self._short_lived = LruEvictor(num_slots)
        self._max_owned = None if tenant_share is None else max(1, int(tenant_share * num_slots))
        self._num_owned: Counter[bytes] = Counter()
        self._greedy: set[bytes] = set()
        self._evictable_of: dict[bytes, OrderedDict[bytes, None]] = {}

    def __len__(self) -> int:
        """Number of evictable blocks."""
        return len(self._lasting) + len(self._short_lived)

    @property
    def num_owned(self) -> dict[bytes, int]:
        """Slots in use by owner, where shares are kept; the largest few dozen."""
        return dict(self._num_owned.most_common(_NUM_OWNERS_SHOWN))

    # slots, leased ones and all

    def take_slot(self, owner: bytes) -> None:
        """An owner has one slot more."""
        if self._max_owned is None or owner == NO_OWNER:
            return
        self._num_owned[owner] += 1
        if self._num_owned[owner] > self._max_owned:
            self._greedy.add(owner)

    def give_slot(self, owner: bytes) -> None:
        """An owner has one slot less."""
        if self._max_owned is None or owner == NO_OWNER:
            return
        self._num_owned[owner] -= 1
        if self._num_owned[owner] <= self._max_owned:
            self._greedy.discard(owner)
        if not self._num_owned[owner]:
            del self._num_owned[owner]

    # evictable blocks

    def admit(self, key: bytes, owner: bytes, *, is_lasting: bool) -> None:
        """The block was used until now and may go from now on."""
        (self._lasting if is_lasting else self._short_lived).admit(key)
        if self._max_owned is not None and owner != NO_OWNER:
            own = self._evictable_of.setdefault(owner, OrderedDict())
            own[key] = None
            own.move_to_end(key)

    def withdraw(self, key: bytes, owner: bytes, *, is_lasting: bool) -> None:
        """The block is in use."""
        (self._lasting if is_lasting else self._short_lived).withdraw(key)
        self._disown(key, owner)

    def remove(self, key: bytes, owner: bytes, *, is_lasting: bool, is_evicted: bool) -> None:
        """The block is gone; see the port for `is_evicted`."""
        (self._lasting if is_lasting else self._short_lived).remove(key, is_evicted=is_evicted)
        self._disown(key, owner)

    # questions

    def next_victims(self, count: int) -> list[bytes]:
        """Up to `count` blocks in the order they should go; changes nothing."""
        greedy = self.next_greedy_victims(count)
        taken = set(greedy)
        rest = self._short_lived.next_victims(count)
        if len(taken) + len(rest) < count:
            rest += self._lasting.next_victims(count)
        return (greedy + [key for key in rest if key not in taken])[:count]

    def next_greedy_victims(self, count: int) -> list[bytes]:
        """Up to `count` blocks above their owner's share, its least recently used first."""
        victims: list[bytes] = []
        for owner in sorted(self._greedy, key=self._num_owned.__getitem__, reverse=True):
            num_above = self._num_owned[owner] - (self._max_owned or 0)
            own = self._evictable_of.get(owner, _NOTHING)
            victims += islice(own, min(num_above, count - len(victims)))
        return victims

    def find_expired(self, now_s: float) -> list[bytes]:
        """Blocks that should go even when there is room; changes nothing."""
        return self._lasting.find_expired(now_s)

    def _disown(self, key: bytes, owner: bytes) -> None:
        own = self._evictable_of.get(owner)
        if own is not None:
            own.pop(key, None)
            if not own:
                del self._evictable_of[owner]
