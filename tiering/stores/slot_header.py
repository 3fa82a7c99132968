"""What the first 4 KiB of a slab file, and the table of every unit in it, say about themselves."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from tiering.block_stamp import OWNER_BYTES, BlockStamp
from tiering.errors import SlotCorrupt
from tiering.stores.block_store import PAGE_BYTES

STORE_ID_BYTES = 16
ENTRY_BYTES = 128
FORM_BYTES = 16
_VERSION = 3
_SLOT_MAGIC = b"PTMNSLOT"
_FILE_MAGIC = b"PTMNSLAB"
_CHECKSUM = struct.Struct("<Q")
# magic, version, slot, store id, key, generation, num_tokens, num_bytes, payload xxh3_64, owner
_SLOT = struct.Struct(f"<8sIQ16s16sQQQQ{OWNER_BYTES}s")
# magic, version, store id, block_bytes, unit_slots, form
_FILE = struct.Struct(f"<8sI16sQI{FORM_BYTES}s")
_NO_OWNER = bytes(OWNER_BYTES)


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """How a slab file is cut: `store_id` is new with every layout, so old slots die with it.

    `unit_slots` slots lie side by side, with one table of their headers behind them. `form` says how
    the blocks are packed (`BlockCodec.name`, at most 16 letters), empty when they lie as they are.
    """

    store_id: bytes
    block_bytes: int
    unit_slots: int
    form: str = ""


def _sealed(fields: bytes, num_bytes: int) -> bytes:
    page = fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
    return page.ljust(num_bytes, b"\0")


def _unsealed(page: bytes, shape: struct.Struct, num_bytes: int) -> tuple[object, ...] | None:
    """Fields of a page whose checksum holds, else None."""
    if len(page) != num_bytes:
        return None
    (checksum,) = _CHECKSUM.unpack_from(page, shape.size)
    if xxhash.xxh3_64_intdigest(page[: shape.size]) != checksum:
        return None
    return shape.unpack_from(page)


def pack_superblock(layout: SlabLayout) -> bytes:
    """First page of a slab file."""
    fields = (layout.store_id, layout.block_bytes, layout.unit_slots, layout.form.encode())
    return _sealed(_FILE.pack(_FILE_MAGIC, _VERSION, *fields), PAGE_BYTES)


def unpack_superblock(page: bytes) -> SlabLayout | None:
    """The layout of a slab file; None when the page is no sound superblock of this version."""
    match _unsealed(page, _FILE, PAGE_BYTES):
        case (
            bytes() as magic,
            int() as version,
            bytes() as store_id,
            int() as block_bytes,
            int() as unit_slots,
            bytes() as form,
        ):
            is_ours = (magic, version) == (_FILE_MAGIC, _VERSION) and block_bytes and unit_slots
            name = form.rstrip(b"\0").decode(errors="replace")
            return SlabLayout(store_id, block_bytes, unit_slots, name) if is_ours else None
        case _:
            return None


def pack_header(store_id: bytes, slot: int, stamp: BlockStamp) -> bytes:
    """Header of a slot, ENTRY_BYTES long."""
    numbers = (stamp.generation, stamp.num_tokens, stamp.num_bytes, stamp.checksum)
    ids = (store_id, stamp.key)
    fields = _SLOT.pack(_SLOT_MAGIC, _VERSION, slot, *ids, *numbers, stamp.owner or _NO_OWNER)
    return _sealed(fields, ENTRY_BYTES)


def is_of_other_layout(entry: bytes, store_id: bytes) -> bool:
    """A sound header that an earlier layout of the file left behind."""
    fields = _unsealed(entry, _SLOT, ENTRY_BYTES)
    return fields is not None and fields[0] == _SLOT_MAGIC and fields[3] != store_id


def is_header(entry: bytes) -> bool:
    """Begins like one. What does not is no damage where an earlier layout may have had its payload there."""
    return entry.startswith(_SLOT_MAGIC)


def unpack_header(entry: bytes, store_id: bytes, slot: int) -> BlockStamp:
    """What a slot says it holds.

    Raises:
        SlotCorrupt: the entry is damaged, invalidated, or another slot's or another layout's.
    """
    fields = _unsealed(entry, _SLOT, ENTRY_BYTES)
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
            bytes() as tag,
        ):
            owner = b"" if tag == _NO_OWNER else tag
            return BlockStamp(key, generation, num_tokens, num_bytes, checksum, owner)
        case _:
            raise SlotCorrupt(slot, "header fields")
