"""The store port: slots of equal size that hold the bytes of blocks."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from tiering.block_stamp import BlockStamp

PAGE_BYTES = 4096
PIECE_BYTES = 512 << 10  # with its source it fits into the second level of cache

ByteArray = npt.NDArray[np.uint8]


def padded(num_bytes: int) -> int:
    """Round up to whole pages: O_DIRECT moves nothing smaller."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def payload_checksum(payload: ByteArray) -> int:
    """Checksum of a contiguous array; guards bytes, identifies nothing.

    xxh3_64; of more than `PIECE_BYTES` the xxh3_64 of those of its pieces, as little-endian numbers.
    In pieces, so that whoever moves a block can check each while it lies in the core's cache, and
    each in one call: that takes two thirds of the time of a running sum.
    """
    data = payload.data
    return join_checksums(
        piece_checksum(data[start : start + PIECE_BYTES])
        for start in range(0, data.nbytes, PIECE_BYTES)
    )


def copy_with_checksum(source: ByteArray, target: ByteArray) -> int:
    """Copy a contiguous array and give the checksum of the copy, in about the time of a plain copy."""
    old, new = source.data, target.data
    sums: list[int] = []
    for start in range(0, old.nbytes, PIECE_BYTES):
        piece = new[start : start + PIECE_BYTES]
        piece[:] = old[start : start + PIECE_BYTES]
        sums.append(piece_checksum(piece))
    return join_checksums(sums)


def piece_checksum(piece: memoryview) -> int:
    """Of `PIECE_BYTES`, or of what is left at the end."""
    return xxhash.xxh3_64_intdigest(piece)


def join_checksums(sums: Iterable[int]) -> int:
    """The checksum of a payload from those of its pieces, in order."""
    numbers = list(sums)
    if len(numbers) == 1:
        return numbers[0]
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(numbers)}Q", *numbers))


class BlockStore(Protocol):
    """Bytes by slot number. It keeps no index: who may use which slot is the directory's business.

    Calls on different slots may run at the same time on different threads.
    """

    @property
    def num_slots(self) -> int:
        """Slots 0 to num_slots - 1."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Room for one block, a multiple of 4096."""
        ...

    def write(self, slot: int, stamp: BlockStamp, payload: ByteArray) -> None:
        """Store the first `stamp.num_bytes` of a contiguous uint8 array.

        Raises:
            OSError: the medium refuses (full, broken).
            ValueError: the block does not fit the slot, or the payload is too short.
        """
        ...

    def read(self, slot: int, stamp: BlockStamp, into: ByteArray) -> None:
        """Copy `stamp.num_bytes` into a contiguous uint8 array and verify them.

        After an error the contents of `into` are undefined.

        Raises:
            SlotCorrupt: the slot does not hold the bytes of this stamp.
            OSError: the medium refuses.
            ValueError: `into` is too short.
        """
        ...

    def close(self) -> None:
        """Let go of the medium. Idempotent."""
        ...
