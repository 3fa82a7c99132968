"""Which slots of one tier are free."""

from __future__ import annotations

from collections import deque

from tiering.errors import SlotMisuse


class SlotPool:
    """Free list over `num_slots` slots; free + used + quarantined is always `num_slots`.

    First in, first out: a slot whose writer was cut off rests as long as possible before another
    holder's bytes lie where that writer might still put its own.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = deque(range(num_slots))
        self._used: set[int] = set()
        self._quarantined: set[int] = set()

    @property
    def num_free(self) -> int:
        """Slots that `take` can still give."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots that somebody holds."""
        return len(self._used)

    @property
    def num_quarantined(self) -> int:
        """Slots that gave wrong bytes and are out of use until the tier is laid out again."""
        return len(self._quarantined)

    def take(self) -> int | None:
        """Take the slot that has been free for longest; None when there is none."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._used.add(slot)
        return slot

    def take_exactly(self, slots: set[int]) -> None:
        """Take given slots out of the free list (recovery of a tier that survived).

        Raises:
            SlotMisuse: one of them is not free.
        """
        for slot in slots - set(self._free):
            raise SlotMisuse(slot, "is not free")
        self._free = deque(slot for slot in self._free if slot not in slots)
        self._used |= slots

    def give_back(self, slot: int) -> None:
        """Free a used slot.

        Raises:
            SlotMisuse: the slot is not in use.
        """
        self._leave_use(slot)
        self._free.append(slot)

    def quarantine(self, slot: int) -> None:
        """Take a used slot out of circulation.

        Raises:
            SlotMisuse: the slot is not in use.
        """
        self._leave_use(slot)
        self._quarantined.add(slot)

    def _leave_use(self, slot: int) -> None:
        if slot not in self._used:
            raise SlotMisuse(slot, "is not in use")
        self._used.remove(slot)
