"""The client end of kvd's Unix socket: one request, one reply, and what may go wrong between."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tiering import frames
from tiering.errors import KvdUnavailable, LayoutMismatch, LayoutNotPacked, ProtocolViolation
from tiering.kvd import protocol
from tiering.kvd.protocol import Op, Status

_GREETING_BYTES = 4096  # no answer to HELLO is longer
_NO_FD = -1


@dataclass(frozen=True, slots=True)
class Welcome:
    """kvd's answer to a greeting; `slab_fd` is the receiver's to close, -1 for an operator."""

    session: bytes
    slot_bytes: int
    slab_bytes: int
    slab_fd: int = _NO_FD


class KvdConnection:
    """One connection, synchronous.

    Every call raises `KvdUnavailable` when the daemon is away, late or broke off; the connection is
    closed then.
    """

    def __init__(self, socket_path: Path, timeout_s: float) -> None:
        self._path = str(socket_path)
        self.timeout_s = timeout_s
        self._socket: socket.socket | None = None

    @property
    def is_open(self) -> bool:
        """The greeting was accepted and nothing failed since."""
        return self._socket is not None

    @property
    def has_hung_up(self) -> bool:
        """The daemon ended this connection: between a reply and the next request nothing else arrives."""
        if self._socket is None:
            return False
        ear = select.poll()
        ear.register(self._socket, select.POLLIN)
        return bool(ear.poll(0))

    @property
    def is_alive(self) -> bool:
        """Neither side has ended this connection up to now. Any thread, requests under way or not."""
        connection = self._socket
        if connection is None or (descriptor := connection.fileno()) < 0:
            return False
        ear = select.poll()
        ear.register(descriptor, 0)  # a hang-up is told unasked
        # A socket forgets its number before it is closed: so what was asked is still ours.
        return not ear.poll(0) and connection.fileno() == descriptor

    def open(self, holder: str, block_bytes: int, namespace: str = "") -> Welcome:
        """Connect and greet; `block_bytes` 0 greets as an operator, who gets no slab.

        Raises:
            KvdUnavailable: nobody answers, or not in time.
            LayoutMismatch: kvd serves smaller blocks; both sizes are named.
            LayoutNotPacked: kvd packs the blocks of another layout; both are named.
        """
        self.close()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self.timeout_s)
        self._socket = connection
        try:
            connection.connect(self._path)
            return self._greet(connection, [holder, block_bytes, namespace])
        except (OSError, ProtocolViolation) as error:
            raise self.broken_off(error) from error
        except (LayoutMismatch, LayoutNotPacked):
            self.close()
            raise

    def close(self) -> None:
        """End the connection. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ask(self, op: Op, *arguments: object, more_s: float = 0.0) -> object:
        """The value of the reply; `more_s` is added to the time limit of this request."""
        connection = self._socket
        if connection is None:
            raise KvdUnavailable(self._path, "not connected")
        try:
            if more_s:
                connection.settimeout(self.timeout_s + more_s)
            connection.sendall(frames.encode_frame([int(op), *arguments]))
            prefix = self._receive(connection, frames.LENGTH.size)
            body = self._receive(connection, frames.frame_length(prefix))
            if more_s:
                connection.settimeout(self.timeout_s)
            return _accepted(body)
        except (OSError, ProtocolViolation) as error:
            raise self.broken_off(error) from error

    def broken_off(self, error: Exception) -> KvdUnavailable:
        """Close: a late reply to this request must not be taken for the next one's."""
        self.close()
        return KvdUnavailable(self._path, str(error) or type(error).__name__)

    def _greet(self, connection: socket.socket, greeting: Sequence[object]) -> Welcome:
        frame = frames.encode_frame([int(Op.HELLO), protocol.VERSION, *greeting])
        connection.sendall(frame)
        data, fds, _, _ = socket.recv_fds(connection, _GREETING_BYTES, 1)
        try:
            status, value = self._greeting_reply(connection, data)
            match status, value:
                case Status.LAYOUT_MISMATCH, [int() as wanted_bytes, int() as served_bytes]:
                    raise LayoutMismatch(wanted_bytes, served_bytes)
                case Status.LAYOUT_NOT_PACKED, [str() as wanted, str() as served]:
                    raise LayoutNotPacked(wanted, served)
                case Status.OK, [bytes() as session, int() as slot_bytes, int() as slab_bytes]:
                    slab_fd = fds.pop() if fds else _NO_FD
                    return Welcome(session, slot_bytes, slab_bytes, slab_fd)
                case _:
                    raise ProtocolViolation(f"greeting refused: {value}")
        finally:
            for fd in fds:
                os.close(fd)

    def _greeting_reply(self, connection: socket.socket, data: bytes) -> tuple[object, object]:
        while len(data) < frames.LENGTH.size or len(data) < frames.LENGTH.size + (
            frames.frame_length(data[: frames.LENGTH.size])
        ):
            more = connection.recv(_GREETING_BYTES)
            if not more:
                raise ConnectionError("closed during the greeting")
            data += more
        return _split_reply(data[frames.LENGTH.size :])

    def _receive(self, connection: socket.socket, num_bytes: int) -> bytes:
        data = connection.recv(num_bytes)
        while len(data) < num_bytes:
            more = connection.recv(num_bytes - len(data))
            if not more:
                raise ConnectionError("closed by kvd")
            data += more
        return data


def _split_reply(body: bytes) -> tuple[object, object]:
    match frames.decode_body(body):
        case [status, value]:
            return status, value
        case _:
            raise ProtocolViolation("no reply")


def _accepted(body: bytes) -> object:
    status, value = _split_reply(body)
    if status != Status.OK:
        raise ProtocolViolation(f"refused: {value}")
    return value
