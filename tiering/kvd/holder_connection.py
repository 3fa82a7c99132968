"""One connection of kvd's Unix socket: frames in, replies out, one request at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine
from typing import Protocol

import structlog

from tiering import frames
from tiering.block_layout import BlockLayout
from tiering.errors import LayoutMismatch, LayoutNotPacked, ProtocolViolation
from tiering.kvd import protocol
from tiering.kvd.protocol import Op, Status
from tiering.kvd.requests import OPERATOR_OPS, Host, Reply, Requests

log = structlog.get_logger(__name__)

MAX_HOLDERS = 1024


class Server(Host, Protocol):
    """The server as its connections see it."""

    session: bytes
    slab_fd: int
    slab_bytes: int
    connections: dict[int, HolderConnection]


class HolderConnection(asyncio.Protocol):
    """One holder, or an operator.

    Most requests are answered inside `data_received`, without a task switch. While one waits for
    disk, room or a peer, nothing more is read than shows that the process is still there: neither
    side can pile up, and one that dies meanwhile is noticed.
    """

    def __init__(self, server: Server, holder_id: int) -> None:
        self.holder: str | None = None
        self.is_operator = False
        self._server = server
        self._cache = server.cache
        self._holder_id = holder_id
        self._requests = Requests(server, holder_id)
        self._frames = frames.FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._slow: asyncio.Task[None] | None = None
        self._is_choked = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A process connected."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a stream transport is needed")
        self._transport = transport
        if len(self._server.connections) >= MAX_HOLDERS:
            log.warning("holder_refused", num_holders=MAX_HOLDERS)
            transport.abort()
            return
        self._server.connections[self._holder_id] = self

    def connection_lost(self, exc: Exception | None) -> None:
        """The process closed the connection or died."""
        self._server.connections.pop(self._holder_id, None)
        if self._slow is not None:
            self._slow.cancel()
        self._cache.forget_holder(self._holder_id)
        if self.holder is not None:
            log.info("holder_left", holder=self.holder, is_error=exc is not None)

    def data_received(self, data: bytes) -> None:
        """Bytes came in."""
        self._frames.feed(data)
        self._serve()

    def pause_writing(self) -> None:
        """The holder does not read its replies."""
        self._is_choked = True
        self._regulate()

    def resume_writing(self) -> None:
        """The holder reads again."""
        self._is_choked = False
        self._serve()

    def abort(self) -> None:
        """Break the connection off."""
        if self._transport is not None:
            self._transport.abort()

    # requests

    def _serve(self) -> None:
        try:
            while not self._is_busy and (body := self._frames.pop()) is not None:
                self._answer(frames.decode_body(body))
        except ProtocolViolation as error:
            log.warning("holder_broken_off", holder=self.holder, reason=error.reason)
            self.abort()
            return
        self._regulate()

    @property
    def _is_busy(self) -> bool:
        return self._slow is not None or self._is_choked

    def _regulate(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        has_more = self._slow is not None and not self._frames.is_empty
        if self._is_choked or has_more:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def _answer(self, message: list[object]) -> None:
        op, *arguments = message
        if op == Op.HELLO:
            self._hello(arguments)
            return
        number = frames.as_int(op)
        if self.holder is None or (self.is_operator and number not in OPERATOR_OPS):
            raise ProtocolViolation(f"operation {op} out of turn")
        self._cache.hear_holder(self._holder_id)
        result = self._requests.answer(number, arguments)
        if isinstance(result, tuple):
            self._reply(*result)
        else:
            self._slow = asyncio.ensure_future(self._answer_later(result))
            self._slow.add_done_callback(self._close_if_failed)

    async def _answer_later(self, result: Coroutine[None, None, Reply]) -> None:
        reply = await result
        self._slow = None
        self._reply(*reply)
        self._serve()

    def _close_if_failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("request_failed", holder=self.holder, exc_info=error)
            self.abort()

    def _reply(self, status: Status, value: object) -> None:
        if self._transport is not None:
            self._transport.write(frames.encode_frame([int(status), value]))

    def _hello(self, arguments: list[object]) -> None:
        match frames.with_defaults(arguments, None, None, None, ""):
            case [protocol.VERSION, str() as holder, int() as block_bytes, str() as namespace]:
                pass
            case _:
                self._reply(Status.REFUSED, f"this kvd speaks version {protocol.VERSION}")
                return
        if self.holder is not None or block_bytes < 0:
            raise ProtocolViolation("a second or senseless greeting")
        if block_bytes and not self._accept_layout(block_bytes, holder, namespace):
            return
        self.holder = holder[: protocol.MAX_HOLDER_CHARS]
        self.is_operator = not block_bytes
        if not self.is_operator:
            name = self._cache.namespace_of(namespace[: protocol.MAX_NAMESPACE_CHARS])
            self._requests.namespace = name
            self._server.library.add_namespace(self._requests.namespace)
        log.info("holder_joined", holder=self.holder)
        server = self._server
        value = [server.session, self._cache.slot_bytes, server.slab_bytes]
        if self.is_operator:
            self._reply(Status.OK, value)
        else:
            self._send_with_slab(frames.encode_frame([int(Status.OK), value]))

    def _accept_layout(self, block_bytes: int, holder: str, namespace: str) -> bool:
        layout = BlockLayout.described(namespace)
        try:
            self._cache.accept_layout(block_bytes, self._server.num_holders, layout)
        except LayoutMismatch as error:
            log.warning("holder_refused", holder=holder, reason=str(error))
            self._reply(Status.LAYOUT_MISMATCH, [error.wanted_bytes, error.served_bytes])
            return False
        except LayoutNotPacked as error:
            log.warning("holder_refused", holder=holder, reason=str(error))
            self._reply(Status.LAYOUT_NOT_PACKED, [error.wanted, error.served])
            return False
        return True

    def _send_with_slab(self, frame: bytes) -> None:
        # The first bytes on this connection: the socket's buffer is empty and takes them whole.
        if self._transport is None:
            return
        fd = os.dup(self._transport.get_extra_info("socket").fileno())
        with socket.socket(fileno=fd) as raw, contextlib.suppress(OSError):
            socket.send_fds(raw, [frame], [self._server.slab_fd])
