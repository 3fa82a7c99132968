"""One block of a tier, as its index knows it."""

from __future__ import annotations

from dataclasses import dataclass

from tiering.block_stamp import BlockStamp
from tiering.eviction.eviction_order import NO_OWNER
from tiering.tier import SlotState

READABLE = (SlotState.READY, SlotState.EVICTING)


@dataclass(slots=True, eq=False)
class Block:
    """One slot in use. `stamp` is None until the bytes are complete.

    `is_listed`: the index finds it; an unlisted block only waits for its last lease, or rests.
    `lifetime_s`: seconds from publication to its drop; None is without end.
    `num_uses`: how often it was written, offered again or leased since it came here.
    """

    key: bytes
    slot: int
    generation: int
    state: SlotState
    holder_id: int
    deadline_s: float | None = None
    lifetime_s: float | None = None
    stamp: BlockStamp | None = None
    owner: bytes = NO_OWNER
    num_leases: int = 0
    num_uses: int = 1
    is_listed: bool = True

    @property
    def is_readable(self) -> bool:
        """The bytes are complete and a new lease may be given."""
        return self.is_listed and self.state in READABLE
