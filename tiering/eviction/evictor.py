"""The eviction port."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Evictor(Protocol):
    """Orders the blocks of one tier that may go.

    A key is admitted, then withdrawn and admitted again for each use, then removed. Only admitted
    keys are proposed: the directory withdraws a block when it is leased, so a leased block cannot
    be a victim. A key that is admitted while it is admitted was used in passing.
    """

    def admit(self, key: bytes) -> None:
        """The block was used until now and may be evicted from now on."""
        ...

    def withdraw(self, key: bytes) -> None:
        """The block is in use; it stays in the tier. Keys that are not admitted are fine."""
        ...

    def remove(self, key: bytes, *, is_evicted: bool) -> None:
        """The block left the tier. Unknown keys are fine.

        `is_evicted`: it left to make room, so a policy that remembers what it let go learns from
        it; a discarded, expired or corrupt block teaches nothing.
        """
        ...

    def next_victims(self, count: int) -> list[bytes]:
        """Up to `count` blocks in the order they should go; changes nothing."""
        ...

    def find_expired(self, now_s: float) -> list[bytes]:
        """Blocks that should go even when there is room; changes nothing."""
        ...

    def __len__(self) -> int:
        """Number of evictable blocks."""
        ...


NewEvictor = Callable[[int], Evictor]
"""Makes the evictor of a tier with so many slots."""
