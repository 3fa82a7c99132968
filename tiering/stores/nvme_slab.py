"""Blocks in one preallocated file: the slab file of the NVMe tier.

File: superblock (4 KiB), then slots of 4 KiB self-describing header + payload padded to 4 KiB. Write
order is invalidate, payload, header: a writer killed at any point leaves a slot that is the old
block, no block, or the new block (a header-first slab gave out wrong blocks; notes/kv.md 5d).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import threading
from pathlib import Path

import numpy as np
import structlog

from tiering.block_stamp import BlockStamp
from tiering.errors import SlotCorrupt
from tiering.stores.block_store import PAGE_BYTES, ByteArray, padded, payload_checksum
from tiering.stores.slot_header import (
    STORE_ID_BYTES,
    SlabLayout,
    is_of_other_layout,
    pack_header,
    pack_superblock,
    unpack_header,
    unpack_superblock,
)

log = structlog.get_logger(__name__)

_NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)


def _aligned(num_bytes: int) -> ByteArray:
    return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)


class _AlignedBuffers(threading.local):
    """Page-aligned scratch memory of each I/O thread, made once: O_DIRECT takes no other."""

    def __init__(self) -> None:
        self.page = _aligned(PAGE_BYTES)
        self._payload = _aligned(PAGE_BYTES)

    def payload(self, num_bytes: int) -> ByteArray:
        if self._payload.nbytes < num_bytes:
            self._payload = _aligned(num_bytes)
        return self._payload


class NvmeSlab:
    """A slab file, opened and locked; `lay_out` cuts it into slots.

    O_DIRECT is used where the file system takes it (tmpfs and some overlays do not). When the disk
    cannot hold `num_bytes`, the file keeps the size it had, with as many slots as fit.

    Raises:
        OSError: the file cannot be opened, is locked by another process, or has no room at all.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._buffers = _AlignedBuffers()
        self._layout: SlabLayout | None = None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._num_bytes = self._allocate(num_bytes)
            self.is_direct = self._probe_direct_io()
            self._layout = unpack_superblock(self._read_page(0))
        except OSError:
            self.close()
            raise

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
    def num_slots(self) -> int:
        """Slots 0 to num_slots - 1."""
        if self._layout is None:
            return 0
        return max(self._num_bytes - PAGE_BYTES, 0) // (PAGE_BYTES + self.slot_bytes)

    def lay_out(self, block_bytes: int) -> None:
        """Cut the file for blocks of this size; every block in it is gone.

        Raises:
            OSError: the superblock cannot be written.
        """
        layout = SlabLayout(secrets.token_bytes(STORE_ID_BYTES), block_bytes)
        self._write_page(0, pack_superblock(layout))
        os.fdatasync(self._fd)
        self._layout = layout

    def inspect(self, slot: int) -> BlockStamp | None:
        """What the slot's header says it holds; None for an empty slot or one of an old layout.

        Raises:
            SlotCorrupt: the header is damaged or another slot's.
            OSError: the header cannot be read.
        """
        page = self._read_page(self._offset(slot))
        if not any(page) or is_of_other_layout(page, self._store_id):
            return None
        return unpack_header(page, self._store_id, slot)

    def write(self, slot: int, stamp: BlockStamp, payload: ByteArray) -> None:
        """Store a block. An aligned payload of whole pages is written from where it lies."""
        if not stamp.num_bytes <= min(self.slot_bytes, payload.nbytes):
            raise ValueError(f"{stamp.num_bytes} bytes of {payload.nbytes} do not fit a slot")
        num_bytes = padded(stamp.num_bytes)
        source = payload
        if not _is_aligned(payload, num_bytes):
            source = self._buffers.payload(self.slot_bytes)
            source[: stamp.num_bytes] = payload[: stamp.num_bytes]
        self.invalidate(slot)
        self._write_fully(source[:num_bytes], self._offset(slot) + PAGE_BYTES)
        self._write_page(self._offset(slot), pack_header(self._store_id, slot, stamp))

    def read(self, slot: int, stamp: BlockStamp, into: ByteArray) -> None:
        """Read header and payload in one call and verify both against the stamp."""
        if stamp.num_bytes > into.nbytes:
            raise ValueError(f"{stamp.num_bytes} bytes do not fit into {into.nbytes}")
        if stamp.num_bytes > self.slot_bytes:
            raise SlotCorrupt(slot, "the stamp is longer than the slot")
        num_bytes = padded(stamp.num_bytes)
        is_aligned = _is_aligned(into, num_bytes)
        target = into if is_aligned else self._buffers.payload(self.slot_bytes)
        header = self._buffers.page
        parts = [header.data, target[:num_bytes].data]
        if os.preadv(self._fd, parts, self._offset(slot)) != PAGE_BYTES + num_bytes:
            raise SlotCorrupt(slot, "short read")
        if unpack_header(header.tobytes(), self._store_id, slot) != stamp:
            raise SlotCorrupt(slot, "header of another block")
        if payload_checksum(target[: stamp.num_bytes]) != stamp.checksum:
            raise SlotCorrupt(slot, "payload checksum")
        if not is_aligned:
            into[: stamp.num_bytes] = target[: stamp.num_bytes]

    def invalidate(self, slot: int) -> None:
        """Wipe the slot's header, so that no restart finds a block in it.

        Raises:
            OSError: the header cannot be written.
        """
        self._write_page(self._offset(slot), bytes(PAGE_BYTES))

    def sync(self) -> None:
        """Wait until what was written is on the medium.

        Raises:
            OSError: the medium refuses.
        """
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file and give up its lock. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def _store_id(self) -> bytes:
        return self._layout.store_id if self._layout else b""

    def _offset(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} of {self.num_slots}")
        return PAGE_BYTES + slot * (PAGE_BYTES + self.slot_bytes)

    def _allocate(self, num_bytes: int) -> int:
        """Make the file `num_bytes` long with room on the disk; returns the length it has."""
        old_bytes = os.fstat(self._fd).st_size
        try:
            os.posix_fallocate(self._fd, 0, num_bytes)
        except OSError as error:
            os.ftruncate(self._fd, old_bytes)  # gives back what was taken before it failed
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or old_bytes < PAGE_BYTES:
                raise
            log.warning("nvme_slab_not_grown", wanted_bytes=num_bytes, kept_bytes=old_bytes)
            return min(old_bytes, num_bytes)
        os.ftruncate(self._fd, num_bytes)  # a smaller setting gives the rest of the disk back
        return num_bytes

    def _probe_direct_io(self) -> bool:
        """Switch to O_DIRECT if one aligned read works with it."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            self._read_page(0)
        except OSError as error:
            if error.errno not in _NO_DIRECT_IO:
                raise
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False
        return True

    def _read_page(self, offset: int) -> bytes:
        page = self._buffers.page
        num_bytes = os.preadv(self._fd, [page.data], offset)
        return page[:num_bytes].tobytes()

    def _write_page(self, offset: int, page: bytes) -> None:
        buffer = self._buffers.page
        buffer[:] = np.frombuffer(page, dtype=np.uint8)
        self._write_fully(buffer, offset)

    def _write_fully(self, data: ByteArray, offset: int) -> None:
        written = os.pwrite(self._fd, data.data, offset)
        if written != data.nbytes:
            # On a regular file a short write means that the next byte would not fit.
            raise OSError(errno.ENOSPC, f"wrote {written} of {data.nbytes} bytes")


def _is_aligned(data: ByteArray, num_bytes: int) -> bool:
    return data.nbytes >= num_bytes and data.ctypes.data % PAGE_BYTES == 0
