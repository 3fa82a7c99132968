"""Blocks that go to neighbouring slots of a slab file together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np

from tiering.block_codec import BlockCodec
from tiering.block_stamp import BlockStamp
from tiering.errors import SlotCorrupt
from tiering.stores.block_store import ByteArray, payload_checksum
from tiering.stores.nvme_slab import NvmeSlab
from tiering.stores.slab_file import Scratch

_NOTHING: ByteArray = np.empty(0, dtype=np.uint8)


class StoreResult(Enum):
    """What became of a block that was to be written back."""

    STORED = auto()
    REFUSED = auto()  # no room, no healthy disk, the day's bytes are written, or not to be packed
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


class SlabRuns:
    """Moves blocks between DRAM and neighbouring slots: as they are, or packed by `codec`. Any thread.

    What lies in a slot has a stamp of its own, over the bytes that lie there; what comes back has
    one over the bytes that came.
    """

    def __init__(self, codec: BlockCodec | None = None) -> None:
        self._codec = codec
        self._scratch = Scratch()

    @property
    def form(self) -> str:
        """As in `SlabLayout`."""
        return self._codec.name if self._codec else ""

    def stored_bytes(self, block_bytes: int) -> int:
        """What a block takes on the disk."""
        return self._codec.packed_bytes if self._codec else block_bytes

    def write(
        self,
        slab: NvmeSlab,
        slot: int,
        stamps: Sequence[BlockStamp],
        payloads: Sequence[ByteArray],
    ) -> tuple[list[BlockStamp | StoreResult], float]:
        """Write the blocks whose bytes are those of their stamps.

        What lies in each slot now, and the seconds that the disk took, without the packing.
        """
        room = self._room(slab, len(stamps))
        ready = [
            self._prepared(stamp, payload, target)
            for stamp, payload, target in zip(stamps, payloads, room, strict=True)
        ]
        sound = [pair for pair in ready if isinstance(pair, tuple)]
        began_s = time.monotonic()
        if len(sound) == len(ready):
            slab.write_run(slot, [stamp for stamp, _ in sound], [payload for _, payload in sound])
        else:
            for index, pair in enumerate(ready):
                if isinstance(pair, tuple):
                    slab.write(slot + index, *pair)
        took_s = time.monotonic() - began_s
        return [pair[0] if isinstance(pair, tuple) else pair for pair in ready], took_s

    def read(
        self,
        slab: NvmeSlab,
        slot: int,
        stamps: Sequence[BlockStamp],
        into: Sequence[ByteArray],
    ) -> tuple[list[BlockStamp | SlotCorrupt], float]:
        """Read and verify blocks.

        The stamp of each as it lies in its array, or what is wrong, and the seconds that the disk
        took, without the unpacking.
        """
        codec = self._codec
        room = into if codec is None else self._room(slab, len(stamps))
        began_s = time.monotonic()
        faults = slab.read_run(slot, stamps, room)
        took_s = time.monotonic() - began_s
        return [
            fault or (self._unpacked(codec, stamp, packed, target) if codec else stamp)
            for fault, stamp, packed, target in zip(faults, stamps, room, into, strict=True)
        ], took_s

    def _room(self, slab: NvmeSlab, num_slots: int) -> list[ByteArray]:
        """Memory for packed blocks, one array per slot; good until the thread's next call."""
        if self._codec is None:
            return [_NOTHING] * num_slots
        room = self._scratch.payload(num_slots * slab.slot_bytes)
        return list(room.reshape(num_slots, slab.slot_bytes))

    def _prepared(
        self, stamp: BlockStamp, payload: ByteArray, target: ByteArray
    ) -> tuple[BlockStamp, ByteArray] | StoreResult:
        """What is to be written of a block, or why nothing is."""
        codec = self._codec
        is_whole = codec is not None and stamp.num_bytes == codec.layout.block_bytes
        is_packed = codec is not None and is_whole and codec.pack(payload, target)
        # After packing: what was read for it is what is checked.
        if payload_checksum(payload[: stamp.num_bytes]) != stamp.checksum:
            return StoreResult.BAD_SOURCE
        if codec is None:
            return stamp, payload
        if not is_packed:
            return StoreResult.REFUSED
        num_bytes = codec.packed_bytes
        return replace(
            stamp, num_bytes=num_bytes, checksum=payload_checksum(target[:num_bytes])
        ), target

    @staticmethod
    def _unpacked(
        codec: BlockCodec, stamp: BlockStamp, packed: ByteArray, into: ByteArray
    ) -> BlockStamp:
        num_bytes = codec.layout.block_bytes
        codec.unpack(packed, into)
        return replace(stamp, num_bytes=num_bytes, checksum=payload_checksum(into[:num_bytes]))


def newest_copies(found: dict[int, BlockStamp]) -> dict[int, BlockStamp]:
    """The slot of the last written copy of each block, oldest first.

    An older copy lies in a slot that was given up and not yet written again.
    """
    by_key: dict[bytes, tuple[int, BlockStamp]] = {}
    for slot, stamp in sorted(found.items(), key=lambda item: item[1].generation):
        by_key.pop(stamp.key, None)
        by_key[stamp.key] = (slot, stamp)
    return dict(by_key.values())
