"""Blocks that go to neighbouring slots of a slab file together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from tiering.block_stamp import BlockStamp
from tiering.stores.block_store import ByteArray, payload_checksum
from tiering.stores.nvme_slab import NvmeSlab


class StoreResult(Enum):
    """What became of a block that was to be written back."""

    STORED = auto()
    REFUSED = auto()  # no room, no healthy disk, or the day's bytes are written
    NOT_ADMITTED = auto()  # writes are dear, and it was used too little
    BAD_SOURCE = auto()  # the DRAM bytes were not those of the stamp


@dataclass(frozen=True, slots=True)
class Source:
    """A block in DRAM that is offered; `num_uses` as in `Block`, None passes any filter."""

    stamp: BlockStamp
    payload: ByteArray
    num_uses: int | None = None


def runs_of(slots: Iterable[int], unit_slots: int) -> list[range]:
    """Cut positions of slots into runs of neighbours in one unit."""
    runs: list[range] = []
    last_slot = -1
    for position, slot in enumerate(slots):
        if runs and slot == last_slot + 1 and slot % unit_slots:
            runs[-1] = range(runs[-1].start, position + 1)
        else:
            runs.append(range(position, position + 1))
        last_slot = slot
    return runs


def checked_write(
    slab: NvmeSlab, slot: int, stamps: Sequence[BlockStamp], payloads: Sequence[ByteArray]
) -> list[bool]:
    """Write the blocks whose bytes are those of their stamps; says which."""
    is_sound = [
        payload_checksum(payload[: stamp.num_bytes]) == stamp.checksum
        for stamp, payload in zip(stamps, payloads, strict=True)
    ]
    if all(is_sound):
        slab.write_run(slot, stamps, payloads)
        return is_sound
    for index, is_good in enumerate(is_sound):
        if is_good:
            slab.write(slot + index, stamps[index], payloads[index])
    return is_sound


def newest_copies(found: dict[int, BlockStamp]) -> dict[int, BlockStamp]:
    """The slot of the last written copy of each block, oldest first.

    An older copy lies in a slot that was given up and not yet written again.
    """
    by_key: dict[bytes, tuple[int, BlockStamp]] = {}
    for slot, stamp in sorted(found.items(), key=lambda item: item[1].generation):
        by_key.pop(stamp.key, None)
        by_key[stamp.key] = (slot, stamp)
    return dict(by_key.values())
