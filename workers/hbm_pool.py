"""The memory of an engine's KV blocks, and how their bytes get in and out of it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog

from tiering.lease import SharedSlab
from tiering.stores.block_store import padded

ByteArray = npt.NDArray[np.uint8]

log = structlog.get_logger(__name__)

_REACH_BYTES = 256 << 30  # of addresses, not of memory: the largest slab that can lie behind a pool
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # Python 3.11 has no names for them


class HbmPool(Protocol):
    """`num_blocks` blocks of `block_bytes` on an engine's device, block-major.

    The engine's steps use it in place. One other thread, the mover's, reads and writes whole blocks
    that no step writes meanwhile: it reads what a step before the call has written, and what it
    writes is there for steps after `settle`.
    """

    @property
    def num_blocks(self) -> int: ...  # noqa: D102  # the class says it
    @property
    def block_bytes(self) -> int: ...  # noqa: D102

    def read(self, block_ids: Sequence[int]) -> Iterator[ByteArray]:
        """The blocks' bytes on the host, one by one; each is good until the next is asked for."""
        ...

    def begin_write(self, block_id: int) -> ByteArray:
        """Host memory for the block's new bytes. Followed by `finish_write`, or given up."""
        ...

    def finish_write(self, block_id: int) -> None:
        """The memory of the last `begin_write` holds the block; its move begins."""
        ...

    def settle(self) -> None:
        """Returns when all that was written is in its place."""
        ...

    def attach(self, slab: SharedSlab) -> bool:
        """Let steps and `read` find slot i of a slab, unchanged, as block `num_blocks` + i.

        False: this pool cannot. The slab is good until `detach` or the next `attach`.
        """
        ...

    def detach(self) -> None:
        """Let go of the slab. What still reads one of its blocks reads anything, and does no harm."""
        ...


class HostPool:
    """The pool of an engine whose device is the host: a block is its own host memory.

    Blocks begin on pages, as those of a slab do, and addresses behind them are kept free, so that
    a slab mapped there goes on where the pool ends. `blocks`: uint8 (num_blocks, block_bytes);
    `reach`: the same and all that can lie behind.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._stride = padded(block_bytes)
        self._pool_bytes = num_blocks * self._stride
        self._memory, self._reach_bytes = _allocate(self._pool_bytes)
        self._attached_bytes = 0
        num_reached = (self._pool_bytes + self._reach_bytes) // self._stride
        rows = np.frombuffer(self._memory, dtype=np.uint8, count=num_reached * self._stride)
        self.reach: ByteArray = rows.reshape(num_reached, self._stride)[:, :block_bytes]
        self.blocks: ByteArray = self.reach[:num_blocks]
        self.blocks.fill(0)  # touch every page now: a first touch costs more than a step

    @property
    def num_blocks(self) -> int:
        """See the port."""
        return len(self.blocks)

    @property
    def block_bytes(self) -> int:
        """See the port."""
        return int(self.blocks.shape[1])

    def read(self, block_ids: Sequence[int]) -> Iterator[ByteArray]:
        """See the port."""
        return (self.reach[block_id] for block_id in block_ids)

    def begin_write(self, block_id: int) -> ByteArray:
        """See the port."""
        row: ByteArray = self.blocks[block_id]
        return row

    def finish_write(self, block_id: int) -> None:
        """See the port; it was written in place."""

    def settle(self) -> None:
        """See the port."""

    def attach(self, slab: SharedSlab) -> bool:
        """See the port. The slab can be read there, not written."""
        self.detach()
        if slab.slot_bytes != self._stride or slab.num_bytes > self._reach_bytes:
            log.info(
                "slab_not_attached",
                slot_bytes=slab.slot_bytes,
                own_bytes=self._stride,
                num_bytes=slab.num_bytes,
                reach_bytes=self._reach_bytes,
            )
            return False
        try:
            self._map_behind(slab.num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, slab.descriptor)
        except OSError as error:
            log.warning("slab_not_attached", reason=str(error), num_bytes=slab.num_bytes)
            return False
        self._attached_bytes = slab.num_bytes
        return True

    def detach(self) -> None:
        """See the port."""
        if self._attached_bytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._map_behind(self._attached_bytes, mmap.PROT_READ, flags, -1)
            self._attached_bytes = 0

    def _map_behind(self, num_bytes: int, protection: int, flags: int, descriptor: int) -> None:
        """Map what lies right behind the pool anew; Python's own mmap takes no address."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        address = self.blocks.ctypes.data + self._pool_bytes
        mapped = libc.mmap(
            ctypes.c_void_p(address),
            ctypes.c_size_t(num_bytes),
            protection,
            flags | _MAP_FIXED,
            descriptor,
            ctypes.c_long(0),
        )
        if mapped != address:
            raise OSError(ctypes.get_errno(), "mmap behind the pool")


def _allocate(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Memory, and how many addresses are free behind it: none where the system keeps strict count."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory, reach = (
            mmap.mmap(-1, num_bytes + _REACH_BYTES, flags | _MAP_NORESERVE),
            _REACH_BYTES,
        )
    except OSError:
        memory, reach = mmap.mmap(-1, num_bytes, flags), 0
    with suppress(OSError):  # where it is allowed, a step misses the TLB less
        memory.madvise(mmap.MADV_HUGEPAGE, 0, num_bytes)
    return memory, reach
