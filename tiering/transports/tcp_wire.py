"""What peers ask each other over TCP once they have greeted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

from tiering import frames
from tiering.block_stamp import BlockStamp
from tiering.errors import ProtocolViolation
from tiering.transports.block_transport import Compatibility, Library, Loan, OfferedBlock
from tiering.transports.peer_socket import PeerSocket

MAX_PULL_BYTES = 1 << 30  # of one pull: it must not hold a node's slots for ever
MAX_STREAM_BYTES = 64 << 20  # of one measurement
MAX_STREAM_BLOCK_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 64 << 10  # of an echo


class PeerOp(IntEnum):
    """First element of a request; the answer is a frame, after PULL and STREAM also bare bytes."""

    FIND = 1  # keys -> num_blocks
    # keys, wait_s -> [[num_tokens, num_bytes, checksum, lifetime_s | None, owner]], then the bytes
    PULL = 2
    ECHO = 3  # payload -> payload
    STREAM = 4  # block_bytes, num_blocks -> num_bytes, then the bytes
    # peer, [block sizes], seconds -> round_trip_s, kind, nominal bytes_per_s, [[block_bytes,
    # num_bytes, bytes_per_s]], or a sentence
    MEASURE = 5
    # keys, wait_s, nixl metadata, address, stride, num_slots -> [rows as of PULL], or a sentence; then
    # num_taken -> num_written, and for each further round: index of its first block -> num_written
    PUSH = 6


@contextmanager
def lend_for_pull(
    peer: PeerSocket, wanted: Compatibility, library: Library, keys: list[bytes], wait_s: float
) -> Iterator[Loan]:
    """What one pull may have of a library, within the connection's time."""
    max_blocks = max(MAX_PULL_BYTES // wanted.block_bytes, 1)
    wait_s = min(wait_s, peer.deadline_s - time.monotonic())
    with library.lend(keys, max_blocks, max(wait_s, 0.0)) as loan:
        yield loan


def pack_offer(offered: Sequence[OfferedBlock]) -> list[list[object]]:
    """Rows of the answer to PULL."""
    return [
        [b.stamp.num_tokens, b.stamp.num_bytes, b.stamp.checksum, b.lifetime_s, b.stamp.owner]
        for b in offered
    ]


def parse_offer(rows: object, keys: Sequence[bytes], block_bytes: int) -> list[OfferedBlock]:
    """The blocks offered for the first of the keys.

    Raises:
        ProtocolViolation: it is no offer for these keys, or a block is larger than blocks are.
    """
    if not isinstance(rows, list) or len(rows) > len(keys):
        raise ProtocolViolation("no offer")
    return [_parsed_row(row, key, block_bytes) for row, key in zip(rows, keys, strict=False)]


def _parsed_row(row: object, key: bytes, block_bytes: int) -> OfferedBlock:
    match row:
        case [num_tokens, num_bytes, checksum, lifetime_s, owner]:
            size = frames.as_int(num_bytes, block_bytes)
            if not size:
                raise ProtocolViolation("an empty block")
            numbers = frames.as_int(num_tokens, 2**32), size, frames.as_int(checksum)
            stamp = BlockStamp(key, 0, *numbers, frames.as_owner(owner))
            lifetime = None if lifetime_s is None else frames.as_seconds(lifetime_s)
            return OfferedBlock(stamp, lifetime)
        case _:
            raise ProtocolViolation("no offered block")
