"""The eviction port."""

from __future__ import annotations

from typing import Protocol


class Evictor(Protocol):
    """Orders the blocks that may go.

    It knows only evictable blocks: the directory withdraws a block when it is leased and admits it
    again when the last lease ends, so a leased block cannot be proposed.
    """

    def admit(self, key: bytes) -> None:
        """The block was used until now and may be evicted from now on."""
        ...

    def withdraw(self, key: bytes) -> None:
        """The block is leased, or gone. Unknown keys are fine."""
        ...

    def next_victims(self, count: int) -> list[bytes]:
        """Up to `count` blocks in the order they should go; changes nothing."""
        ...

    def __len__(self) -> int:
        """Number of evictable blocks."""
        ...
