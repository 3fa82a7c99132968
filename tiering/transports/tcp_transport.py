"""Blocks over plain TCP, the asking side. A connection serves one question and is not kept."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tiering import frames
from tiering.errors import PeerCorrupt, PeerUnavailable, ProtocolViolation
from tiering.transports.block_transport import Compatibility, Room
from tiering.transports.handshake import greet
from tiering.transports.peer_socket import PeerSocket
from tiering.transports.tcp_wire import PeerOp, parse_offer

DEFAULT_STALL_S = 2.0
_WAIT_SHARE = 0.5  # of the time left that the peer may spend on bringing blocks up from its disk


class TcpTransport:
    """See the port `BlockTransport`. `secret` is shared by all nodes; `stall_s` the longest silence.

    Nodes are many and pulls are large: a pool of idle connections would cost each of them a thread
    at every other, and saves one round trip.
    """

    def __init__(self, secret: bytes, stall_s: float = DEFAULT_STALL_S) -> None:
        self._secret = secret
        self._stall_s = stall_s

    def find(
        self, peer: str, wanted: Compatibility, keys: Sequence[bytes], deadline_s: float
    ) -> int:
        """See the port."""
        with self.greeted(peer, wanted, deadline_s) as connection:
            connection.send(PeerOp.FIND, list(keys[: frames.MAX_KEYS]))
            (num_blocks,) = frames.as_arguments(connection.receive(), 1)
            return frames.as_int(num_blocks, len(keys))

    def pull(
        self,
        peer: str,
        wanted: Compatibility,
        keys: Sequence[bytes],
        room: Room,
        deadline_s: float,
    ) -> int:
        """See the port."""
        num_bytes = 0
        with self.greeted(peer, wanted, deadline_s) as connection:
            wait_s = self.wait_share(deadline_s)
            connection.send(PeerOp.PULL, list(keys[: frames.MAX_KEYS]), max(wait_s, 0.0))
            connection.allow_silence(wait_s)
            (rows,) = frames.as_arguments(connection.receive(), 1)
            offered = parse_offer(rows, keys, wanted.block_bytes)
            for index, target in enumerate(room.take(offered) if offered else ()):
                stamp = offered[index].stamp
                if connection.receive_block(target[: stamp.num_bytes]) != stamp.checksum:
                    raise PeerCorrupt(peer, index, "payload checksum")
                room.publish(index)
                num_bytes += stamp.num_bytes
        return num_bytes

    @staticmethod
    def wait_share(deadline_s: float) -> float:
        """Seconds that the peer may spend on bringing blocks up from its disk."""
        return (deadline_s - time.monotonic()) * _WAIT_SHARE

    @contextmanager
    def greeted(self, peer: str, wanted: Compatibility, deadline_s: float) -> Iterator[PeerSocket]:
        """A connection that has shaken hands, closed in the end; errors as in the port."""
        try:
            with PeerSocket.connect(peer, self._stall_s, deadline_s) as connection:
                greet(connection, peer, self._secret, wanted)
                yield connection
        except (OSError, ProtocolViolation) as error:
            raise PeerUnavailable(peer, str(error) or type(error).__name__) from error
