"""One preallocated, locked file with direct I/O where the file system takes it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import structlog

from tiering.stores.block_store import PAGE_BYTES, ByteArray

log = structlog.get_logger(__name__)

_NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)


def aligned_array(num_bytes: int) -> ByteArray:
    """Zeroed memory that O_DIRECT takes: it starts on a page."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)


def is_aligned(data: ByteArray, num_bytes: int) -> bool:
    """`num_bytes` can be moved between the array and the disk as it lies (read-only ones: never)."""
    if data.nbytes < num_bytes or not data.flags.writeable:
        return False
    address = ctypes.addressof(
        ctypes.c_char.from_buffer(data.data)
    )  # 3 times as fast as `data.ctypes`
    return address % PAGE_BYTES == 0


class Scratch(threading.local):
    """Page-aligned memory of each I/O thread, made once and grown on demand."""

    def __init__(self) -> None:
        self._table = aligned_array(PAGE_BYTES)
        self._payload = aligned_array(PAGE_BYTES)

    def table(self, num_bytes: int) -> ByteArray:
        """Room for pages of headers."""
        if self._table.nbytes < num_bytes:
            self._table = aligned_array(num_bytes)
        return self._table[:num_bytes]

    def payload(self, num_bytes: int) -> ByteArray:
        """Room for blocks whose own memory is not aligned."""
        if self._payload.nbytes < num_bytes:
            self._payload = aligned_array(num_bytes)
        return self._payload[:num_bytes]


class SlabFile:
    """`num_bytes` of a file, allocated on the disk and locked against other processes.

    When the disk cannot hold so many, the file keeps the size it had (`num_bytes` says which).
    Offsets, lengths and memory are multiples of a page.

    Raises:
        OSError: the file cannot be opened, is locked, or has no room at all.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.num_bytes = self._allocate(num_bytes)
            self.is_direct = self._probe_direct_io()
        except OSError:
            self.close()
            raise

    def read(self, parts: Sequence[ByteArray], offset: int) -> int:
        """Fill arrays one behind the other; returns the bytes read, fewer at the file's end."""
        return os.preadv(self._fd, [part.data for part in parts], offset)

    def write(self, parts: Sequence[ByteArray], offset: int) -> None:
        """Write arrays one behind the other, in one call.

        Raises:
            OSError: the medium refuses, or took only a part.
        """
        wanted = sum(part.nbytes for part in parts)
        written = os.pwritev(self._fd, [part.data for part in parts], offset)
        if written != wanted:
            # On a regular file a short write means that the next byte would not fit.
            raise OSError(errno.ENOSPC, f"wrote {written} of {wanted} bytes")

    def sync(self) -> None:
        """Wait until what was written is on the medium."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file and give up its lock. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

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
            self.read([aligned_array(PAGE_BYTES)], 0)
        except OSError as error:
            if error.errno not in _NO_DIRECT_IO:
                raise
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False
        return True
