"""Blocks over plain TCP, the lending side: a thread per connection, few of them, none for long."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Protocol

import numpy as np
import structlog

from tiering import frames
from tiering.errors import ProtocolViolation, TieringError
from tiering.transports.block_transport import Compatibility, Library
from tiering.transports.handshake import NO_BLOCKS, receive_greeting
from tiering.transports.link_probe import LONGEST_PROBE_S, pack_probe, probe_link
from tiering.transports.peer_socket import PeerSocket
from tiering.transports.tcp_transport import DEFAULT_STALL_S, TcpTransport
from tiering.transports.tcp_wire import (
    MAX_PAYLOAD_BYTES,
    MAX_STREAM_BLOCK_BYTES,
    MAX_STREAM_BYTES,
    PeerOp,
    lend_for_pull,
    pack_offer,
)

log = structlog.get_logger(__name__)

MAX_CONNECTIONS = 16
MAX_CONNECTION_S = 30.0
_BACKLOG = 64
_STOP_LIMIT_S = 5.0
_MAX_SIZES = 8


class BlockPusher(Protocol):
    """Brings blocks to an asker by another way than the connection that it asks on."""

    def push(
        self, peer: PeerSocket, wanted: Compatibility, library: Library, arguments: list[object]
    ) -> None:
        """Answer a PUSH; its arguments are not checked yet. Raises as `PeerSocket`."""
        ...


class TcpOnly:
    """There is no other way here."""

    def push(
        self, peer: PeerSocket, wanted: Compatibility, library: Library, arguments: list[object]
    ) -> None:
        """See the port: says so."""
        del wanted, library, arguments
        peer.send("transport tcp")


class TcpBlockServer:
    """Lends a library's blocks to whoever knows the secret.

    Connections beyond `MAX_CONNECTIONS` are closed at once: the asker computes its blocks instead.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        library: Library,
        stall_s: float = DEFAULT_STALL_S,
        *,
        pusher: BlockPusher | None = None,
    ) -> None:
        """`port` 0 takes any that is free; `pusher` serves those who want blocks by another way."""
        self._host, self._port = host, port
        self._secret = secret
        self._library = library
        self._stall_s = stall_s
        self._pusher = pusher or TcpOnly()
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_stopping = False
        self._num_refused = 0
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._accept, name="peer-accept", daemon=True)

    def start(self) -> int:
        """Bind, listen and serve; the port.

        Raises:
            OSError: the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listener = socket.create_server(
            (self._host, self._port), family=family, backlog=_BACKLOG
        )
        self._thread.start()
        return int(self._listener.getsockname()[1])

    def stop(self) -> None:
        """Refuse new peers and break off the others."""
        self._is_stopping = True
        if self._listener is None:
            return
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._listener.close()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(_STOP_LIMIT_S)

    def _accept(self) -> None:
        while not self._is_stopping and self._listener is not None:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._is_stopping:
                    log.warning("peer_not_accepted", error=str(error))
                    time.sleep(self._stall_s)  # out of descriptors, say
                continue
            if not self._places.acquire(blocking=False):
                connection.close()
                continue
            with self._lock:
                self._open.add(connection)
            threading.Thread(
                target=self._serve, args=(connection,), name="peer-serve", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            deadline_s = time.monotonic() + MAX_CONNECTION_S
            with PeerSocket(connection, self._stall_s, deadline_s) as peer:
                wanted = receive_greeting(peer, self._secret, self._library)
                if wanted is None:
                    self._note_refusal("greeting")
                    return
                while self._answer(peer, wanted):
                    pass
        except (OSError, TieringError) as error:
            if not self._is_stopping:
                self._note_refusal(type(error).__name__)
        finally:
            connection.close()
            with self._lock:
                self._open.discard(connection)
            self._places.release()

    def _note_refusal(self, reason: str) -> None:
        self._num_refused += 1
        if self._num_refused.bit_count() == 1:  # the 1st, 2nd, 4th, ...: no flood
            log.warning("peer_broken_off", reason=reason, num_so_far=self._num_refused)

    def _answer(self, peer: PeerSocket, wanted: Compatibility) -> bool:
        """One request; False when the peer is done."""
        request = peer.receive_or_end()
        if request is None:
            return False
        match request:
            case [PeerOp.ECHO, bytes() as payload] if len(payload) <= MAX_PAYLOAD_BYTES:
                peer.send(payload)
            case [PeerOp.STREAM, block_bytes, num_blocks]:
                _stream(peer, frames.as_int(block_bytes), frames.as_int(num_blocks))
            case [PeerOp.MEASURE, str() as other, list() as sizes, seconds]:
                self._measure(peer, other, sizes, frames.as_seconds(seconds, LONGEST_PROBE_S))
            case [PeerOp.FIND, keys] if wanted != NO_BLOCKS:
                peer.send(self._library.find(frames.as_keys(keys)))
            case [PeerOp.PULL, keys, wait_s] if wanted != NO_BLOCKS:
                self._push(peer, wanted, frames.as_keys(keys), frames.as_seconds(wait_s))
            case [PeerOp.PUSH, *arguments] if wanted != NO_BLOCKS:
                self._pusher.push(peer, wanted, self._library, arguments)
            case _:
                raise ProtocolViolation("no request of a peer")
        return True

    def _measure(self, peer: PeerSocket, other: str, sizes: list[object], seconds: float) -> None:
        block_sizes = [frames.as_int(size, MAX_STREAM_BLOCK_BYTES) for size in sizes[:_MAX_SIZES]]
        transport = TcpTransport(self._secret, self._stall_s)
        try:
            peer.send(*pack_probe(probe_link(transport, other, block_sizes, seconds)))
        except TieringError as error:
            peer.send(str(error))

    def _push(
        self, peer: PeerSocket, wanted: Compatibility, keys: list[bytes], wait_s: float
    ) -> None:
        with lend_for_pull(peer, wanted, self._library, keys, wait_s) as loan:
            peer.send(pack_offer(loan.offered))
            peer.send_blocks(loan.payloads)


def _stream(peer: PeerSocket, block_bytes: int, num_blocks: int) -> None:
    if not 0 < block_bytes <= MAX_STREAM_BLOCK_BYTES or block_bytes * num_blocks > MAX_STREAM_BYTES:
        raise ProtocolViolation("a measurement of too many bytes")
    peer.send(block_bytes * num_blocks)
    block = np.zeros(block_bytes, dtype=np.uint8)
    for _ in range(num_blocks):
        peer.send_blocks([block])
