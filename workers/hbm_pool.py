"""The memory of an engine's KV blocks, and how their bytes get in and out of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]


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


class HostPool:
    """The pool of an engine whose device is the host: a block is its own host memory."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.blocks: ByteArray = np.empty((num_blocks, block_bytes), dtype=np.uint8)
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
        return (self.blocks[block_id] for block_id in block_ids)

    def begin_write(self, block_id: int) -> ByteArray:
        """See the port."""
        row: ByteArray = self.blocks[block_id]
        return row

    def finish_write(self, block_id: int) -> None:
        """See the port; it was written in place."""

    def settle(self) -> None:
        """See the port."""
