"""Blocks in shared memory: one memfd per node, mapped by kvd and by every holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os

import numpy as np

from tiering.block_stamp import BlockStamp
from tiering.errors import SlotCorrupt
from tiering.stores.block_store import (
    PAGE_BYTES,
    ByteArray,
    copy_with_checksum,
    padded,
    payload_checksum,
)

# Linux 5.14; Python 3.11 has no name for it.
_MADV_POPULATE_WRITE = 23
_POPULATED_AT_ONCE_BYTES = 32 << 20


def create_slab_memory(num_bytes: int) -> int:
    """Make a sealed memfd of at least one page; returns its descriptor.

    It has no name in any file system, so nothing is left behind whoever dies. The seals keep a
    holder from truncating it under the others (that would be a SIGBUS for all of them).
    """
    fd = os.memfd_create("pointsman-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, padded(max(num_bytes, 1)))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def map_slab_memory(fd: int, num_bytes: int, *, is_owner: bool) -> mmap.mmap:
    """Map a slab with every page present: a first touch costs several times the copy itself.

    The owner pays for the pages once, every other process for its page table (about 0.2 s a GiB).
    It is done in pieces, since the call holds the interpreter lock.

    Raises:
        OSError: there is not so much memory.
    """
    memory = mmap.mmap(fd, num_bytes)
    with contextlib.suppress(OSError):  # where shmem_enabled lets us, a copy misses the TLB less
        memory.madvise(mmap.MADV_HUGEPAGE)
    try:
        for start in range(0, num_bytes, _POPULATED_AT_ONCE_BYTES):
            length = min(_POPULATED_AT_ONCE_BYTES, num_bytes - start)
            memory.madvise(_MADV_POPULATE_WRITE, start, length)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        if is_owner:  # an older kernel; nobody else writes here yet
            pages = np.frombuffer(memory, dtype=np.uint8)[::PAGE_BYTES]
            pages |= 0
    return memory


class DramSlab:
    """A slab of block slots over a memfd; it owns its mapping, not the descriptor.

    Slot i is bytes [i * slot_bytes, (i + 1) * slot_bytes), page-aligned, so that the NVMe store
    reads and writes it without a copy in between.

    Raises:
        ValueError: a block has no byte.
    """

    def __init__(self, memory: mmap.mmap, block_bytes: int) -> None:
        if block_bytes < 1:
            raise ValueError(f"a block has at least one byte, not {block_bytes}")
        self._memory = memory
        self._slot_bytes = padded(block_bytes)
        self._num_slots = len(memory) // self._slot_bytes
        used = np.frombuffer(memory, dtype=np.uint8, count=self._num_slots * self._slot_bytes)
        self._slots: ByteArray = used.reshape(self._num_slots, self._slot_bytes)

    @property
    def num_slots(self) -> int:
        """Slots 0 to num_slots - 1."""
        return self._num_slots

    @property
    def slot_bytes(self) -> int:
        """Room for one block, a multiple of 4096."""
        return self._slot_bytes

    def view(self, slot: int) -> ByteArray:
        """The slot itself, uint8 (slot_bytes,); valid until `close`."""
        row: ByteArray = self._slots[slot]
        return row

    def fill(self, slot: int, payload: ByteArray) -> int:
        """Copy a whole payload in; returns the checksum of what lies in the slot then.

        Raises:
            ValueError: the payload does not fit.
        """
        if payload.nbytes > self._slot_bytes:
            raise ValueError(f"{payload.nbytes} bytes do not fit a slot")
        return copy_with_checksum(payload, self._slots[slot, : payload.nbytes])

    def write(self, slot: int, stamp: BlockStamp, payload: ByteArray) -> None:
        """Copy the payload in. The stamp is not stored: the index carries it."""
        if not stamp.num_bytes <= min(self._slot_bytes, payload.nbytes):
            raise ValueError(f"{stamp.num_bytes} bytes of {payload.nbytes} do not fit a slot")
        self._slots[slot, : stamp.num_bytes] = payload[: stamp.num_bytes]

    def read(self, slot: int, stamp: BlockStamp, into: ByteArray) -> None:
        """Copy out, then verify the copy: what is checked is what the caller will use."""
        self.copy_out(slot, stamp.num_bytes, stamp.checksum, into)

    def copy_out(self, slot: int, num_bytes: int, checksum: int, into: ByteArray) -> None:
        """`read` without a stamp; same errors."""
        if num_bytes > into.nbytes:
            raise ValueError(f"{num_bytes} bytes do not fit into {into.nbytes}")
        if num_bytes > self._slot_bytes:
            raise SlotCorrupt(slot, "the stamp is longer than the slot")
        stored = self._slots[slot, :num_bytes]
        if copy_with_checksum(stored, into[:num_bytes]) != checksum:
            raise SlotCorrupt(slot, "payload checksum")

    def verify(self, slot: int, stamp: BlockStamp) -> bool:
        """True when the slot holds the bytes of this stamp."""
        if stamp.num_bytes > self._slot_bytes:
            return False
        payload = self._slots[slot, : stamp.num_bytes]
        return payload_checksum(payload) == stamp.checksum

    def close(self) -> None:
        """Unmap. Views from `view` must be gone."""
        self._slots = np.empty((0, self._slot_bytes), dtype=np.uint8)
        self._num_slots = 0
        self._memory.close()
