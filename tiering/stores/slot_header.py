"""What the first 4 KiB of a slab file, and of every slot in it, say about themselves."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from tiering.block_stamp import BlockStamp
from tiering.errors import SlotCorrupt
from tiering.stores.block_store import PAGE_BYTES

STORE_ID_BYTES = 16
_VERSION = 1
_SLOT_MAGIC = b"PTMNSLOT"
_FILE_MAGIC = b"PTMNSLAB"
_CHECKSUM = struct.Struct("<Q")
# magic, version, slot, store id, key, generation, num_tokens, num_bytes, payload xxh3_64
_SLOT = struct.Struct("<8sIQ16s16sQQQQ")
# magic, version, store id, block_bytes
_FILE = struct.Struct("<8sI16sQ")


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """How a slab file is cut: `store_id` is new with every layout, so old slots die with it."""

    store_id: bytes
    block_bytes: int


def _sealed(fields: bytes) -> bytes:
    page = fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
    return page.ljust(PAGE_BYTES, b"\0")


def _unsealed(page: bytes, shape: struct.Struct) -> tuple[object, ...] | None:
    """Fields of a page whose checksum holds, else None."""
    if len(page) != PAGE_BYTES:
        return None
    (checksum,) = _CHECKSUM.unpack_from(page, shape.size)
    if xxhash.xxh3_64_intdigest(page[: shape.size]) != checksum:
        return None
    return shape.unpack_from(page)


def pack_superblock(layout: SlabLayout) -> bytes:
    """First page of a slab file."""
    return _sealed(_FILE.pack(_FILE_MAGIC, _VERSION, layout.store_id, layout.block_bytes))


def unpack_superblock(page: bytes) -> SlabLayout | None:
    """The layout of a slab file; None when the page is no sound superblock of this version."""
    match _unsealed(page, _FILE):
        case (bytes() as magic, int() as version, bytes() as store_id, int() as block_bytes):
            is_ours = magic == _FILE_MAGIC and version == _VERSION and block_bytes > 0
            return SlabLayout(store_id, block_bytes) if is_ours else None
        case _:
            return None


def pack_header(store_id: bytes, slot: int, stamp: BlockStamp) -> bytes:
    """Header page of a slot."""
    return _sealed(
        _SLOT.pack(
            _SLOT_MAGIC,
            _VERSION,
            slot,
            store_id,
            stamp.key,
            stamp.generation,
            stamp.num_tokens,
            stamp.num_bytes,
            stamp.checksum,
        )
    )


def is_of_other_layout(page: bytes, store_id: bytes) -> bool:
    """A sound header that an earlier layout of the file left behind."""
    fields = _unsealed(page, _SLOT)
    return fields is not None and fields[0] == _SLOT_MAGIC and fields[3] != store_id


def unpack_header(page: bytes, store_id: bytes, slot: int) -> BlockStamp:
    """What a slot says it holds.

    Raises:
        SlotCorrupt: the page is damaged, invalidated, or another slot's or another layout's.
    """
    fields = _unsealed(page, _SLOT)
    if fields is None:
        raise SlotCorrupt(slot, "header checksum")
    if fields[:4] != (_SLOT_MAGIC, _VERSION, slot, store_id):
        raise SlotCorrupt(slot, "header of another slot or layout")
    match fields[4:]:
        case (
            bytes() as key,
            int() as generation,
            int() as num_tokens,
            int() as num_bytes,
            int() as checksum,
        ):
            return BlockStamp(key, generation, num_tokens, num_bytes, checksum)
        case _:
            raise SlotCorrupt(slot, "header fields")
