"""Frames of msgpack and the checked values in them: what kvd says to holders and to its peers.

A frame is a u32 big-endian length and that many bytes of msgpack.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import cast

import msgpack

from tiering.block_stamp import KEY_BYTES, OWNER_BYTES
from tiering.errors import ProtocolViolation

MAX_FRAME_BYTES = 8 << 20
MAX_KEYS = 65_536  # of one request; a reply about so many blocks still fits a frame
LENGTH = struct.Struct(">I")


def encode_frame(message: Sequence[object]) -> bytes:
    """One frame.

    Raises:
        ProtocolViolation: the message is too long for a frame.
    """
    body = cast("bytes", msgpack.packb(message))
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolViolation(f"{len(body)} bytes are more than {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(body)) + body


def decode_body(body: bytes) -> list[object]:
    """The non-empty list in a frame.

    Raises:
        ProtocolViolation: the bytes are no msgpack list.
    """
    try:
        message = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolViolation("no msgpack") from error
    if not isinstance(message, list) or not message:
        raise ProtocolViolation("no list")
    return message


def frame_length(prefix: bytes, max_bytes: int = MAX_FRAME_BYTES) -> int:
    """Length of the body that follows a 4-byte prefix.

    Raises:
        ProtocolViolation: the frame would be too long.
    """
    (num_bytes,) = LENGTH.unpack(prefix)
    if num_bytes > max_bytes:
        raise ProtocolViolation(f"a frame of {num_bytes} bytes")
    return cast("int", num_bytes)


class FrameBuffer:
    """Cuts a byte stream into frames; holds at most one frame and one read."""

    def __init__(self) -> None:
        self._pending = bytearray()

    @property
    def is_empty(self) -> bool:
        """Nothing came that was not popped."""
        return not self._pending

    def feed(self, data: bytes) -> None:
        """Append what came in."""
        self._pending += data

    def pop(self) -> bytes | None:
        """The next whole body, or None.

        Raises:
            ProtocolViolation: the next frame is too long.
        """
        if len(self._pending) < LENGTH.size:
            return None
        end = LENGTH.size + frame_length(bytes(self._pending[: LENGTH.size]))
        if len(self._pending) < end:
            return None
        body = bytes(self._pending[LENGTH.size : end])
        del self._pending[:end]
        return body


# Arguments of a request, checked one by one: the other side may be an older or a broken process.


def as_owner(value: object) -> bytes:
    """The tag of a block's owner; empty for none.

    Raises:
        ProtocolViolation: it is something else.
    """
    if not isinstance(value, bytes) or len(value) not in (0, OWNER_BYTES):
        raise ProtocolViolation("no owner")
    return value


def with_defaults(arguments: list[object], *defaults: object) -> list[object]:
    """The arguments, completed by the last of the defaults: an older holder sends fewer."""
    num_missing = len(defaults) - len(arguments)
    return arguments + list(defaults[-num_missing:]) if num_missing > 0 else arguments


def as_arguments(arguments: list[object], num_arguments: int) -> list[object]:
    """The arguments, if they are as many.

    Raises:
        ProtocolViolation: they are not.
    """
    if len(arguments) != num_arguments:
        raise ProtocolViolation(f"{len(arguments)} arguments instead of {num_arguments}")
    return arguments


def as_int(value: object, largest: int = 2**64 - 1) -> int:
    """A number from 0 to `largest`.

    Raises:
        ProtocolViolation: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= largest:
        raise ProtocolViolation(f"no number from 0 to {largest}")
    return value


def as_seconds(value: object, largest_s: float = 86_400.0) -> float:
    """A span of time, cut to a day.

    Raises:
        ProtocolViolation: it is no number, negative, or not a number at all.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise ProtocolViolation("no span of time")
    return min(float(value), largest_s)


def as_rows(value: object, width: int) -> list[list[int]]:
    """Up to MAX_KEYS lists of `width` numbers.

    Raises:
        ProtocolViolation: it is something else.
    """
    if not isinstance(value, list) or len(value) > MAX_KEYS:
        raise ProtocolViolation("no list of rows")
    for row in value:
        if not isinstance(row, list) or len(row) != width:
            raise ProtocolViolation(f"no row of {width} numbers")
        for number in row:
            if type(number) is not int or number < 0:  # msgpack gives none above 64 bits
                raise ProtocolViolation("no number from 0 on")
    return value


def as_keys(value: object) -> list[bytes]:
    """Up to MAX_KEYS block keys.

    Raises:
        ProtocolViolation: it is something else.
    """
    if not isinstance(value, list) or len(value) > MAX_KEYS:
        raise ProtocolViolation("no list of keys")
    for key in value:
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise ProtocolViolation("no block key")
    return value
