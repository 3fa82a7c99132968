"""A TCP socket between two cache daemons: frames and block bytes, never later than a deadline."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence

from tiering import frames
from tiering.stores.block_store import (
    PIECE_BYTES,
    ByteArray,
    join_checksums,
    piece_checksum,
)

_MAX_PARTS = 512  # of one system call (IOV_MAX is 1024)


class PeerSocket:
    """Both ends use it. `stall_s` is the longest silence, `deadline_s` (monotonic) the end of all.

    Every method raises OSError (TimeoutError, ConnectionError) when the other side is late or gone,
    and `ProtocolViolation` for a frame that no peer sends. A context manager that closes.
    """

    def __init__(self, connection: socket.socket, stall_s: float, deadline_s: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._stall_s = stall_s
        self._grace_s = 0.0
        self.deadline_s = deadline_s

    @classmethod
    def connect(cls, address: str, stall_s: float, deadline_s: float) -> PeerSocket:
        """Reach `host:port`."""
        left_s = min(stall_s, deadline_s - time.monotonic())
        if left_s <= 0:
            raise TimeoutError("no time left to connect")
        return cls(socket.create_connection(split_address(address), left_s), stall_s, deadline_s)

    @property
    def addresses(self) -> tuple[str, str]:
        """IP addresses of this end and of the other one."""
        return self._socket.getsockname()[0], self._socket.getpeername()[0]

    def __enter__(self) -> PeerSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._socket.close()

    def send(self, *message: object) -> None:
        """One frame."""
        self._set_limit()
        self._socket.sendall(frames.encode_frame(message))

    def receive(self, max_bytes: int = frames.MAX_FRAME_BYTES) -> list[object]:
        """The next frame."""
        prefix = self._exactly(frames.LENGTH.size)
        return frames.decode_body(self._exactly(frames.frame_length(prefix, max_bytes)))

    def receive_or_end(self) -> list[object] | None:
        """The next frame, None when the other side closes instead."""
        self._set_limit()
        first = self._socket.recv(1)
        if not first:
            return None
        prefix = first + self._exactly(frames.LENGTH.size - 1)
        return frames.decode_body(self._exactly(frames.frame_length(prefix)))

    def allow_silence(self, wait_s: float) -> None:
        """The other side may need so long before it speaks again; it was told so."""
        self._grace_s = max(wait_s, 0.0)

    def send_blocks(self, parts: Sequence[ByteArray]) -> None:
        """Push arrays one behind the other, from where they lie."""
        pending = [part.data for part in parts if part.nbytes]
        start = 0
        while start < len(pending):
            self._set_limit()
            num_sent = self._socket.sendmsg(pending[start : start + _MAX_PARTS])
            while num_sent and num_sent >= pending[start].nbytes:
                num_sent -= pending[start].nbytes
                start += 1
            if num_sent:
                pending[start] = pending[start][num_sent:]

    def receive_block(self, target: ByteArray) -> int:
        """Fill an array; returns the checksum of what lies in it then."""
        sums: list[int] = []
        for start in range(0, target.nbytes, PIECE_BYTES):
            piece = target[start : start + PIECE_BYTES].data
            self._fill(piece)
            sums.append(piece_checksum(piece))
        return join_checksums(sums)

    def check_listens(self) -> None:
        """To be asked while the other side has nothing to say.

        Raises:
            OSError: it has hung up, or the deadline has passed.
        """
        self._set_limit()
        ear = select.poll()
        ear.register(self._socket, select.POLLIN | select.POLLRDHUP)
        if ear.poll(0):
            raise ConnectionError("closed by the peer")

    def _exactly(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        while view.nbytes:
            self._set_limit()
            num_read = self._socket.recv_into(view)
            if not num_read:
                raise ConnectionError("closed by the peer")
            self._grace_s = 0.0
            view = view[num_read:]

    def _set_limit(self) -> None:
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline has passed")
        self._socket.settimeout(min(self._stall_s + self._grace_s, left_s))


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[host]:port`.

    Raises:
        OSError: it is neither.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise OSError(f"no host:port: {address[:100]!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)
