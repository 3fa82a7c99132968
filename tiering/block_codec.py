"""Blocks in a form of half the bytes or less, for the disk: int8 or fp8 with a scale per head.

A packed block is num_layers * 2 * num_kv_heads float32 scales, then one byte per number, both in
the block's order. The largest magnitude of a head's keys (or values) within the block becomes the
largest code, so that a head with large numbers costs the others no precision.

int8: x / scale, rounded. fp8: the bits of e4m3 (four bits of exponent, three of mantissa, largest
448). The exponent of a float32 that was divided by 2**120 is that of e4m3, small numbers included:
packing is one addition that rounds and a shift, over whole arrays.
"""

from __future__ import annotations

import threading
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from tiering.block_layout import BlockLayout

ByteArray = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]

_VERSION = 1
_SCALE_BYTES = 4
_HALF_FLOAT_TOP = (
    1 << 15
)  # half of the last place that stays, when float32 is cut to its high 16 bits
_SIGN = 1 << 31
_HALF_E4M3_PLACE = 1 << 19  # the same when three bits of mantissa stay
# Adding it puts the nearest whole number (of at most 22 bits) into the low bits of a float32.
_WHOLE = np.float32(1.5 * 2**23)
_TO_E4M3_EXPONENT = np.float32(2.0**-120)
_FROM_E4M3_EXPONENT = np.float32(2.0**120)


class Compression(StrEnum):
    """How blocks lie on the disk."""

    NONE = "none"
    INT8 = "int8"
    FP8 = "fp8"


_LARGEST = {Compression.INT8: 127.0, Compression.FP8: 448.0}


class BlockCodec:
    """Packs and unpacks whole blocks of one layout. Any thread.

    Raises:
        ValueError: there is nothing to pack: no compression, or numbers of one byte.
    """

    def __init__(self, layout: BlockLayout, compression: Compression) -> None:
        if compression is Compression.NONE or layout.dtype == "uint8":
            raise ValueError(f"blocks of {layout.dtype} are not packed as {compression}")
        self._layout = layout
        self._compression = compression
        self._largest = np.float32(_LARGEST[compression])
        self._scratch = _Scratch(layout)
        self._num_scales = layout.num_layers * 2 * layout.num_kv_heads

    @property
    def name(self) -> str:
        """Form of the packed bytes; equal names and layouts mean interchangeable bytes."""
        return f"{self._compression}.v{_VERSION}"

    @property
    def layout(self) -> BlockLayout:
        """What it packs."""
        return self._layout

    @property
    def packed_bytes(self) -> int:
        """Bytes of a packed block."""
        layout = self._layout
        num_rows = layout.num_layers * 2 * layout.block_tokens
        num_numbers = num_rows * layout.num_kv_heads * layout.head_dim
        return self._num_scales * _SCALE_BYTES + num_numbers

    def pack(self, block: ByteArray, into: ByteArray) -> bool:
        """Fill the first `packed_bytes` of `into` from a block of `block_bytes`.

        False: the block holds an infinity or no number; `into` is undefined then.
        """
        scratch = self._scratch
        numbers, more = scratch.numbers, scratch.more
        self._widen(block, numbers)
        np.abs(numbers, out=more)
        tops = more.max(axis=1).reshape(scratch.by_head).max(axis=-1)
        if not np.isfinite(tops).all():
            return False
        scales = tops / self._largest
        # A head whose numbers are all zero, or too small to divide by, becomes zeros.
        inverse = np.zeros_like(scales)
        np.divide(1.0, scales, out=inverse, where=scales > np.finfo(np.float32).tiny)
        np.multiply(numbers, self._per_number(inverse), out=numbers)
        num_scale_bytes = scales.nbytes
        into[:num_scale_bytes] = scales.reshape(-1).view(np.uint8)
        codes = into[num_scale_bytes : self.packed_bytes]
        if self._compression is Compression.INT8:
            _to_int8(numbers, codes)
        else:
            _to_e4m3(numbers, codes, more)
        return True

    def unpack(self, packed: ByteArray, into: ByteArray) -> None:
        """Fill the first `block_bytes` of `into` from a packed block."""
        numbers = self._scratch.numbers
        num_scale_bytes = self._num_scales * _SCALE_BYTES
        scales = packed[:num_scale_bytes].view(np.float32).reshape(self._scratch.by_head[:-1])
        codes = packed[num_scale_bytes : self.packed_bytes]
        if self._compression is Compression.INT8:
            numbers[:] = codes.view(np.int8).reshape(numbers.shape)
        else:
            _from_e4m3(codes, numbers)
        np.multiply(numbers, self._per_number(scales), out=numbers)
        self._narrow(numbers, into)

    def _per_number(self, per_head: Float32Array) -> Float32Array:
        """One value per head, spread over the numbers of a token: rows long enough to be fast."""
        spread: Float32Array = np.repeat(per_head, self._layout.head_dim, axis=-1)[:, None, :]
        return spread

    def _widen(self, block: ByteArray, numbers: Float32Array) -> None:
        source = block[: self._layout.block_bytes]
        if self._layout.dtype == "bfloat16":
            _set_high_halves(numbers, source.view(np.uint16))
        else:
            numbers[:] = source.view(self._layout.dtype).reshape(numbers.shape)

    def _narrow(self, numbers: Float32Array, into: ByteArray) -> None:
        target = into[: self._layout.block_bytes]
        if self._layout.dtype == "bfloat16":
            bits = numbers.reshape(-1).view(np.uint32)
            np.add(bits, _HALF_FLOAT_TOP, out=bits)
            np.right_shift(bits, 16, out=target.view(np.uint16), casting="unsafe")
        else:
            target.view(self._layout.dtype)[:] = numbers.reshape(-1)


class _Scratch(threading.local):
    """Room for one block's numbers, twice, for each thread."""

    def __init__(self, layout: BlockLayout) -> None:
        num_groups = layout.num_layers * 2
        self.by_head = (num_groups, layout.num_kv_heads, layout.head_dim)
        shape = (num_groups, layout.block_tokens, layout.num_kv_heads * layout.head_dim)
        self.numbers: Float32Array = np.zeros(shape, dtype=np.float32)
        self.more: Float32Array = np.zeros(shape, dtype=np.float32)


# Casts are several times as fast as copies of every second or fourth item.


def _to_int8(numbers: Float32Array, codes: ByteArray) -> None:
    np.add(numbers, _WHOLE, out=numbers)
    np.copyto(codes, numbers.reshape(-1).view(np.uint32), casting="unsafe")  # the lowest byte


def _to_e4m3(numbers: Float32Array, codes: ByteArray, scratch: Float32Array) -> None:
    np.multiply(numbers, _TO_E4M3_EXPONENT, out=numbers)
    bits, shifted = (array.reshape(-1).view(np.uint32) for array in (numbers, scratch))
    np.add(bits, _HALF_E4M3_PLACE, out=bits)
    # Now sign 31, zeros 30 to 27, exponent 26 to 23, mantissa 22 to 20: a byte but for the sign.
    np.right_shift(bits, 20, out=shifted)
    np.copyto(codes, shifted, casting="unsafe")
    np.bitwise_and(bits, _SIGN, out=bits)
    np.right_shift(bits, 24, out=shifted)
    np.bitwise_or(codes, shifted, out=codes, casting="unsafe")


def _from_e4m3(codes: ByteArray, numbers: Float32Array) -> None:
    # Shifted as signed numbers, the sign fills bits 15 to 11.
    spread: npt.NDArray[np.int16] = np.left_shift(codes.view(np.int8), 4, dtype=np.int16)
    halves = spread.view(np.uint16)
    np.bitwise_and(halves, 0x87F0, out=halves)
    _set_high_halves(numbers, halves)
    np.multiply(numbers, _FROM_E4M3_EXPONENT, out=numbers)


def _set_high_halves(numbers: Float32Array, halves: npt.NDArray[np.uint16]) -> None:
    """A bfloat16 is the high half of a float32; the low one becomes zero."""
    bits = numbers.reshape(-1).view(np.uint32)
    np.left_shift(halves, 16, out=bits, dtype=np.uint32)


def codec_of(layout: BlockLayout | None, compression: Compression) -> BlockCodec | None:
    """What packs blocks of this layout; None where they lie as they are."""
    if layout is None or compression is Compression.NONE or layout.dtype == "uint8":
        return None
    return BlockCodec(layout, compression)
