"""The pool in a GPU's memory: blocks move through pinned host memory on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from tiering.lease import SharedSlab
from workers.hbm_pool import ByteArray

_RING_BLOCKS = 8  # enough that the host's copy and the device's run at the same time


class DevicePool:
    """See `HbmPool`. On a device that is the host itself there is neither stream nor pinning.

    `tensor`: uint8 (num_blocks + num_spare, block_bytes); the spare blocks are the kernels' own.
    """

    def __init__(
        self, num_blocks: int, block_bytes: int, device: torch.device, num_spare: int = 0
    ) -> None:
        self.tensor = torch.zeros(
            (num_blocks + num_spare, block_bytes), dtype=torch.uint8, device=device
        )
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        is_cuda = device.type == "cuda"
        self._stream: Any = _new_stream(device) if is_cuda else None
        self._out = _Ring(block_bytes, pinned=is_cuda)
        self._in = _Ring(block_bytes, pinned=is_cuda)
        self._next_in = 0

    def read(self, block_ids: Sequence[int]) -> Iterator[ByteArray]:
        """See the port. Copies run ahead of the caller by the length of the ring."""
        for number in range(min(len(block_ids), _RING_BLOCKS)):
            self._fetch(number, block_ids[number])
        for number in range(len(block_ids)):
            place = number % _RING_BLOCKS
            self._out.wait(place)
            yield self._out.arrays[place]
            if number + _RING_BLOCKS < len(block_ids):
                self._fetch(place, block_ids[number + _RING_BLOCKS])

    def begin_write(self, block_id: int) -> ByteArray:
        """See the port."""
        self._in.wait(self._next_in)
        return self._in.arrays[self._next_in]

    def finish_write(self, block_id: int) -> None:
        """See the port."""
        with self._on_stream():
            self.tensor[block_id].copy_(self._in.rows[self._next_in], non_blocking=True)
        self._in.mark(self._next_in, self._stream)
        self._next_in = (self._next_in + 1) % _RING_BLOCKS

    def settle(self) -> None:
        """See the port."""
        for place in range(_RING_BLOCKS):
            self._in.wait(place)

    def attach(self, slab: SharedSlab) -> bool:
        """See the port. Every step would read the slab over the bus: it is not done."""
        return False

    def detach(self) -> None:
        """See the port; there is never a slab."""

    def _fetch(self, place: int, block_id: int) -> None:
        with self._on_stream():
            self._out.rows[place].copy_(self.tensor[block_id], non_blocking=True)
        self._out.mark(place, self._stream)

    def _on_stream(self) -> Any:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


class _Ring:
    """Host rows in turn, each with the end of the last copy that used it."""

    def __init__(self, block_bytes: int, *, pinned: bool) -> None:
        self.rows = torch.zeros((_RING_BLOCKS, block_bytes), dtype=torch.uint8, pin_memory=pinned)
        self.arrays: list[ByteArray] = list(self.rows.numpy())
        self._ends: list[Any] = [None] * _RING_BLOCKS

    def mark(self, place: int, stream: Any) -> None:
        """The copies given to the stream up to now end the use of this row."""
        if stream is not None:
            self._ends[place] = stream.record_event()

    def wait(self, place: int) -> None:
        """Returns when the row may be read or written by the host."""
        if self._ends[place] is not None:
            self._ends[place].synchronize()
            self._ends[place] = None


def _new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
