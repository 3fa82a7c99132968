"""Blocks in one preallocated file: the slab file of the NVMe tier.

File: superblock (4 KiB), then units. A unit is `unit_slots` slots of padded payload and, behind
them, the table of their self-describing headers, so that one call moves neighbours together: a
unit has 8 MiB of payload where blocks and file allow it. Write order is invalidate, payload, header
(a header-first slab gave out wrong blocks; notes/kv.md 5d). A run up to the end of its unit takes its
table along in the same call, behind the payload, and is not invalidated before: of a call that is
cut short, the old headers lie over new payload, and their checksums tell. Every header and every
payload is verified on every read.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from tiering.block_stamp import BlockStamp
from tiering.errors import SlotCorrupt
from tiering.stores.block_store import PAGE_BYTES, ByteArray, padded, payload_checksum
from tiering.stores.slab_file import Scratch, SlabFile, aligned_array, is_aligned
from tiering.stores.slot_header import (
    ENTRY_BYTES,
    STORE_ID_BYTES,
    SlabLayout,
    is_header,
    is_of_other_layout,
    pack_header,
    pack_superblock,
    unpack_header,
    unpack_superblock,
)

UNIT_BYTES = 8 << 20
_MAX_UNIT_SLOTS = 256  # with two parts a slot still one system call (IOV_MAX)
_MIN_UNITS = 16  # a full tier makes room by the unit: not too much of it at once
_NUM_LOCKS = 64


class NvmeSlab:
    """A slab file, opened and locked; `lay_out` cuts it into units of slots.

    Calls on different slots may run at the same time on different threads.

    Raises:
        OSError: as `SlabFile`.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._file = SlabFile(path, num_bytes)
        self._scratch = Scratch()
        self._locks = [threading.Lock() for _ in range(_NUM_LOCKS)]
        self._zeros = aligned_array(PAGE_BYTES)
        try:
            self._cut(unpack_superblock(self._read_pages(0, PAGE_BYTES).tobytes()))
        except OSError:
            self.close()
            raise

    @property
    def is_direct(self) -> bool:
        """The page cache is passed by."""
        return self._file.is_direct

    @property
    def layout(self) -> SlabLayout | None:
        """How the file is cut; None before the first `lay_out`."""
        return self._layout

    @property
    def block_bytes(self) -> int:
        """Largest payload of a slot; 0 before the first `lay_out`."""
        return self._layout.block_bytes if self._layout else 0

    @property
    def slot_bytes(self) -> int:
        """Room for one block, a multiple of 4096."""
        return padded(self.block_bytes)

    @property
    def unit_slots(self) -> int:
        """Slots that lie side by side; 1 before the first `lay_out`."""
        return self._layout.unit_slots if self._layout else 1

    @property
    def num_slots(self) -> int:
        """Slots 0 to num_slots - 1."""
        return self._num_units * self.unit_slots

    def lay_out(self, block_bytes: int, form: str = "") -> None:
        """Cut the file for payloads of this size; every block in it is gone. `form` as in `SlabLayout`.

        Raises:
            OSError: the superblock cannot be written.
        """
        num_slots = (self._file.num_bytes - PAGE_BYTES) // (padded(block_bytes) + PAGE_BYTES)
        wanted = min(-(-UNIT_BYTES // padded(block_bytes)), _MAX_UNIT_SLOTS)
        unit_slots = max(min(wanted, num_slots // _MIN_UNITS), 1)
        layout = SlabLayout(secrets.token_bytes(STORE_ID_BYTES), block_bytes, unit_slots, form)
        page = self._scratch.table(PAGE_BYTES)
        page[:] = np.frombuffer(pack_superblock(layout), dtype=np.uint8)
        self._file.write([page], 0)
        self._file.sync()
        self._cut(layout)
        self._is_known[:] = True  # what is on the disk is of another layout: as good as blank

    def inspect(self, slot: int) -> BlockStamp | None:
        """What the slot's header says it holds; None for an empty slot or one of an old layout.

        Raises:
            SlotCorrupt: the header is damaged or another slot's.
            OSError: the header cannot be read.
        """
        unit, index, _ = self._place_run(slot, 1)
        table = self._read_pages(self._table_offset(unit), self._table_bytes)
        return self._stamp_in(table[index * ENTRY_BYTES :][:ENTRY_BYTES].tobytes(), slot)

    def scan(self, units: Iterable[int]) -> tuple[dict[int, BlockStamp], list[SlotCorrupt]]:
        """Headers of whole units: slot -> what it holds, and the damaged ones.

        Where an earlier layout had payload now stands what is no header at all: blank, not damaged.

        Raises:
            OSError: a table cannot be read.
        """
        found: dict[int, BlockStamp] = {}
        damaged: list[SlotCorrupt] = []
        for unit in units:
            table = self._read_pages(self._table_offset(unit), self._table_bytes).tobytes()
            for index in range(self.unit_slots):
                slot = unit * self.unit_slots + index
                entry = table[index * ENTRY_BYTES :][:ENTRY_BYTES]
                try:
                    stamp = self._stamp_in(entry, slot)
                except SlotCorrupt as error:
                    if is_header(entry):
                        damaged.append(error)
                    continue
                if stamp is not None:
                    found[slot] = stamp
        return found, damaged

    # blocks

    def write(self, slot: int, stamp: BlockStamp, payload: ByteArray) -> None:
        """Store one block; see `write_run`."""
        self.write_run(slot, [stamp], [payload])

    def write_run(
        self, slot: int, stamps: Sequence[BlockStamp], payloads: Sequence[ByteArray]
    ) -> None:
        """Store blocks in neighbouring slots of one unit, from `slot` on.

        Aligned payloads of whole pages are written from where they lie. After an OSError none of
        the slots is to be read; a restart may still find there, verified as ever, what came to lie
        whole, or what the call did not reach.

        Raises:
            OSError: the medium refuses.
            ValueError: a block does not fit its slot, or the run does not fit its unit.
        """
        unit, first, last = self._place_run(slot, len(stamps))
        parts = self._parts_to_write(stamps, payloads)
        entries = b"".join(
            pack_header(self._store_id, slot + index, stamp) for index, stamp in enumerate(stamps)
        )
        if last == self.unit_slots:
            self._write_to_end(unit, first, entries, parts)
            return
        with self._lock_of(unit):
            if self._known_table(unit)[first * ENTRY_BYTES : last * ENTRY_BYTES].any():
                self._change_table(unit, first, bytes(len(entries)))
        self._file.write(parts, self._payload_offset(slot))
        with self._lock_of(unit):
            self._change_table(unit, first, entries)

    def read(self, slot: int, stamp: BlockStamp, into: ByteArray) -> None:
        """Read one block and verify it; see `read_run`."""
        (error,) = self.read_run(slot, [stamp], [into])
        if error is not None:
            raise error

    def read_run(
        self, slot: int, stamps: Sequence[BlockStamp], into: Sequence[ByteArray]
    ) -> list[SlotCorrupt | None]:
        """Read blocks from neighbouring slots of one unit; each header and payload is verified.

        None: the array holds the block. Aligned arrays of `slot_bytes` are filled directly, and
        then what lies behind the block in them is undefined.

        Raises:
            OSError: the medium refuses.
            ValueError: an array is too short for its block, or the run leaves its unit.
        """
        for stamp, array in zip(stamps, into, strict=True):
            if stamp.num_bytes > array.nbytes:
                raise ValueError(f"{stamp.num_bytes} bytes do not fit into {array.nbytes}")
        targets = self._targets_to_read(into)
        num_read, entries = self._read_slots(slot, targets)
        errors: list[SlotCorrupt | None] = []
        for index, (stamp, target) in enumerate(zip(stamps, targets, strict=True)):
            num_there = num_read - index * self.slot_bytes
            error = self._fault_of(slot + index, stamp, entries[index], target[: max(num_there, 0)])
            errors.append(error)
            if error is None and not is_aligned(into[index], self.slot_bytes):
                into[index][: stamp.num_bytes] = target[: stamp.num_bytes]
        return errors

    def invalidate(self, slot: int) -> None:
        """Wipe the slot's header, so that no restart finds a block in it.

        Raises:
            OSError: the header cannot be written.
        """
        unit, index, _ = self._place_run(slot, 1)
        with self._lock_of(unit):
            self._change_table(unit, index, bytes(ENTRY_BYTES))

    def sync(self) -> None:
        """Wait until what was written is on the medium.

        Raises:
            OSError: the medium refuses.
        """
        self._file.sync()

    def close(self) -> None:
        """Close the file and give up its lock. Idempotent."""
        self._file.close()

    # places

    @property
    def _store_id(self) -> bytes:
        return self._layout.store_id if self._layout else b""

    @property
    def _table_bytes(self) -> int:
        return padded(self.unit_slots * ENTRY_BYTES)

    @property
    def _unit_bytes(self) -> int:
        return self.unit_slots * self.slot_bytes + self._table_bytes

    @property
    def num_units(self) -> int:
        """Units 0 to num_units - 1."""
        return self._num_units

    def _cut(self, layout: SlabLayout | None) -> None:
        self._layout = layout
        room_bytes = max(self._file.num_bytes - PAGE_BYTES, 0)
        self._num_units = room_bytes // self._unit_bytes if layout else 0
        # What the tables on the disk say, as far as they were read or written: 128 bytes a slot.
        shape = (self._num_units, self.unit_slots * ENTRY_BYTES)
        self._tables = np.zeros(shape, dtype=np.uint8)
        self._is_known = np.zeros(self._num_units, dtype=np.bool_)
        self._zeros = aligned_array(max(self.slot_bytes, PAGE_BYTES))  # behind short blocks

    def _place_run(self, slot: int, num_slots: int) -> tuple[int, int, int]:
        """Unit of a run, its first place there, and the place behind its last."""
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} of {self.num_slots}")
        unit, first = divmod(slot, self.unit_slots)
        if first + num_slots > self.unit_slots:
            raise ValueError(f"{num_slots} slots from {slot} on leave the unit")
        return unit, first, first + num_slots

    def _payload_offset(self, slot: int) -> int:
        unit, index = divmod(slot, self.unit_slots)
        return PAGE_BYTES + unit * self._unit_bytes + index * self.slot_bytes

    def _table_offset(self, unit: int) -> int:
        return PAGE_BYTES + (unit + 1) * self._unit_bytes - self._table_bytes

    # headers

    def _lock_of(self, unit: int) -> threading.Lock:
        return self._locks[unit % _NUM_LOCKS]

    def _known_table(self, unit: int) -> ByteArray:
        """The unit's headers as they are on the disk; the unit's lock is held."""
        table: ByteArray = self._tables[unit]
        if not self._is_known[unit]:
            pages = self._read_pages(self._table_offset(unit), self._table_bytes)
            num_bytes = min(pages.nbytes, table.nbytes)
            table[:num_bytes] = pages[:num_bytes]
            self._is_known[unit] = True
        return table

    def _write_to_end(
        self, unit: int, first: int, entries: bytes, parts: Sequence[ByteArray]
    ) -> None:
        """Write a run that ends with its unit; if that fails, wipe its headers if the disk lets us."""
        with self._lock_of(unit):
            try:
                self._change_table(unit, first, entries, behind=parts)
            except OSError:
                with suppress(OSError):
                    self._change_table(unit, first, bytes(len(entries)))
                raise

    def _change_table(
        self, unit: int, index: int, entries: bytes, behind: Sequence[ByteArray] = ()
    ) -> None:
        """Write headers from place `index` on, in the call that writes the payload before them.

        Without a payload only the pages that change are written. The unit's lock is held.
        """
        table = self._known_table(unit)
        begin, end = index * ENTRY_BYTES, index * ENTRY_BYTES + len(entries)
        table[begin:end] = np.frombuffer(entries, dtype=np.uint8)
        pages = self._scratch.table(self._table_bytes)
        pages[: table.nbytes] = table
        pages[table.nbytes :] = 0
        if behind:
            payload_bytes = sum(part.nbytes for part in behind)
            self._file.write([*behind, pages], self._table_offset(unit) - payload_bytes)
            return
        begin = begin // PAGE_BYTES * PAGE_BYTES
        self._file.write([pages[begin : padded(end)]], self._table_offset(unit) + begin)

    def _stamp_in(self, entry: bytes, slot: int) -> BlockStamp | None:
        if not any(entry) or is_of_other_layout(entry, self._store_id):
            return None
        return unpack_header(entry, self._store_id, slot)

    # moves

    def _read_pages(self, offset: int, num_bytes: int) -> ByteArray:
        """Pages of headers, fewer where the file ends; good until the thread's next call."""
        pages = self._scratch.table(num_bytes)
        return pages[: self._file.read([pages], offset)]

    def _parts_to_write(
        self, stamps: Sequence[BlockStamp], payloads: Sequence[ByteArray]
    ) -> list[ByteArray]:
        """Arrays that fill the slots of a run whole."""
        slot_bytes = self.slot_bytes
        scratch = self._scratch.payload(len(stamps) * slot_bytes)
        parts: list[ByteArray] = []
        for index, (stamp, payload) in enumerate(zip(stamps, payloads, strict=True)):
            if stamp.num_bytes > slot_bytes or stamp.num_bytes > payload.nbytes:
                raise ValueError(f"{stamp.num_bytes} bytes of {payload.nbytes} do not fit a slot")
            num_bytes = padded(stamp.num_bytes)
            source = payload
            if not is_aligned(payload, num_bytes):
                source = scratch[index * slot_bytes :]
                source[: stamp.num_bytes] = payload[: stamp.num_bytes]
            parts.append(source[:num_bytes])
            if num_bytes < slot_bytes:
                parts.append(self._zeros[: slot_bytes - num_bytes])
        return parts

    def _targets_to_read(self, into: Sequence[ByteArray]) -> list[ByteArray]:
        """Memory for whole slots: the arrays themselves where that is possible."""
        if all(is_aligned(array, self.slot_bytes) for array in into):
            return [array[: self.slot_bytes] for array in into]
        scratch = self._scratch.payload(len(into) * self.slot_bytes)
        slots = scratch.reshape(len(into), self.slot_bytes)
        return [
            array[: self.slot_bytes] if is_aligned(array, self.slot_bytes) else copy
            for array, copy in zip(into, slots, strict=True)
        ]

    def _read_slots(self, slot: int, targets: Sequence[ByteArray]) -> tuple[int, list[bytes]]:
        """Payload bytes that were there, and the header of each slot (short at the file's end)."""
        unit, first, last = self._place_run(slot, len(targets))
        table = self._scratch.table(self._table_bytes)
        num_wanted = len(targets) * self.slot_bytes
        if last == self.unit_slots:
            num_read = self._file.read([*targets, table], self._payload_offset(slot))
            table = table[: max(num_read - num_wanted, 0)]
        else:
            num_read = self._file.read(targets, self._payload_offset(slot))
            table = self._read_pages(self._table_offset(unit), self._table_bytes)
        entries = table.tobytes()
        places = range(first * ENTRY_BYTES, last * ENTRY_BYTES, ENTRY_BYTES)
        return num_read, [entries[place : place + ENTRY_BYTES] for place in places]

    def _fault_of(
        self, slot: int, stamp: BlockStamp, entry: bytes, payload: ByteArray
    ) -> SlotCorrupt | None:
        """What is wrong with a slot that was read; `payload` is as much of it as was there."""
        if stamp.num_bytes > self.slot_bytes:
            return SlotCorrupt(slot, "the stamp is longer than the slot")
        if len(entry) < ENTRY_BYTES or payload.nbytes < stamp.num_bytes:
            return SlotCorrupt(slot, "short read")
        try:
            if unpack_header(entry, self._store_id, slot) != stamp:
                return SlotCorrupt(slot, "header of another block")
        except SlotCorrupt as error:
            return error
        if payload_checksum(payload[: stamp.num_bytes]) != stamp.checksum:
            return SlotCorrupt(slot, "payload checksum")
        return None
