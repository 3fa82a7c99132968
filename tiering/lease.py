"""Promises between kvd and a holder, as the holder sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tiering.block_stamp import BlockStamp
from tiering.tier import Tier


class LeasedBlock(NamedTuple):
    """A block that stays in its DRAM slot while the lease lives.

    `tier` says where kvd found it (a block found on NVME was promoted first). A tuple, because a
    lease of many blocks is made on the way to the first token.
    """

    key: bytes
    slot: int
    generation: int
    checksum: int
    tier: Tier
    num_tokens: int
    num_bytes: int

    @property
    def stamp(self) -> BlockStamp:
        """What the slot's bytes are checked against."""
        return BlockStamp(self.key, self.generation, self.num_tokens, self.num_bytes, self.checksum)


@dataclass(slots=True, eq=False)
class BlockLease:
    """The head run of the keys that were asked for; `blocks` is empty when there was none.

    Good until `deadline_s` on this process's monotonic clock, and only against the kvd process
    (`session`) that gave it.
    """

    lease_id: int
    blocks: list[LeasedBlock] = field(default_factory=list)
    session: bytes = b""
    deadline_s: float = 0.0


class SharedSlab(NamedTuple):
    """kvd's DRAM as a descriptor to map: slot i is bytes [i * slot_bytes, (i + 1) * slot_bytes)."""

    descriptor: int
    num_bytes: int
    slot_bytes: int

    @property
    def num_slots(self) -> int:
        """Slots 0 to num_slots - 1."""
        return self.num_bytes // self.slot_bytes


@dataclass(slots=True, eq=False)
class Reservation:
    """A DRAM slot that this holder alone may fill until `deadline_s`; `write` sets `stamp`."""

    key: bytes
    slot: int
    generation: int
    session: bytes = b""
    deadline_s: float = 0.0
    stamp: BlockStamp | None = None


@dataclass(frozen=True, slots=True)
class PeerOffer:
    """Head run that a peer has; `seconds` is how long it took to say so, 0 when it did not answer."""

    peer: str
    num_blocks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PullResult:
    """`num_found`: head run that this node has now. The rest is what this pull brought, from whom."""

    num_found: int
    num_blocks: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    peer: str = ""
