"""The Unix socket of kvd: one connection per holder, one request at a time on each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path

import structlog

from tiering.errors import KvdAlreadyRunning, LayoutMismatch, ProtocolViolation
from tiering.kvd import protocol
from tiering.kvd.node_cache import Acquired, NodeCache, ReserveWish
from tiering.kvd.protocol import FrameBuffer, Op, Status
from tiering.tier import Tier

log = structlog.get_logger(__name__)

MAX_HOLDERS = 1024
_PROBE_TIMEOUT_S = 1.0
_TICK_S = 0.1

Reply = tuple[Status, object]


class KvdServer:
    """Listens on a socket path, owner only, and serves one `NodeCache`.

    `slab_fd` is the memfd that the cache maps, `slab_bytes` its length; it stays the caller's.
    """

    def __init__(self, cache: NodeCache, slab_fd: int, slab_bytes: int) -> None:
        self.cache = cache
        self.slab_fd = slab_fd
        self.slab_bytes = slab_bytes
        self.session = secrets.token_bytes(16)
        self.connections: dict[int, HolderConnection] = {}
        self._next_id = 1
        self._listener: asyncio.Server | None = None
        self._upkeep: list[asyncio.Task[None]] = []
        self._socket_path: Path | None = None

    @property
    def num_holders(self) -> int:
        """Connections that have shaken hands."""
        return sum(connection.holder is not None for connection in self.connections.values())

    async def start(self, socket_path: Path) -> None:
        """Bind and listen; a dead daemon's socket file is replaced.

        Raises:
            KvdAlreadyRunning: a living daemon answers there.
            OSError: the path cannot be bound.
        """
        remove_stale_socket(socket_path)
        loop = asyncio.get_running_loop()
        old_umask = os.umask(0o177)
        try:
            self._listener = await loop.create_unix_server(self._new_connection, str(socket_path))
        finally:
            os.umask(old_umask)
        self._socket_path = socket_path
        self._upkeep = [
            asyncio.ensure_future(self.cache.write_back.pump()),
            asyncio.ensure_future(self._tick()),
        ]

    async def stop(self) -> None:
        """Refuse new holders, break off the others, remove the socket file."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections.values()):
            connection.abort()
        for task in self._upkeep:
            task.cancel()
        await asyncio.gather(*self._upkeep, return_exceptions=True)
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)

    def _new_connection(self) -> HolderConnection:
        connection = HolderConnection(self, self._next_id)
        self._next_id += 1
        return connection

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TICK_S)
            self.cache.expire(loop.time())


def remove_stale_socket(socket_path: Path) -> None:
    """Unlink the socket of a dead daemon.

    Raises:
        KvdAlreadyRunning: somebody answers.
    """
    if not socket_path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(socket_path))
        except (ConnectionRefusedError, FileNotFoundError):
            socket_path.unlink(missing_ok=True)
            return
        except TimeoutError:
            pass  # a full backlog is a sign of life
    raise KvdAlreadyRunning(str(socket_path))


class HolderConnection(asyncio.Protocol):
    """One holder. Most requests are answered inside `data_received`, without a task switch.

    While a request waits for disk or room, reading is paused, so that neither side can pile up.
    """

    def __init__(self, server: KvdServer, holder_id: int) -> None:
        self.holder: str | None = None
        self._server = server
        self._cache = server.cache
        self._holder_id = holder_id
        self._frames = FrameBuffer()
        self._transport: asyncio.Transport | None = None
        self._slow: asyncio.Task[None] | None = None
        self._is_choked = False
        self._handlers: dict[
            int, Callable[[list[object]], Reply | Coroutine[None, None, Reply]]
        ] = {
            Op.FIND: self._find,
            Op.ACQUIRE: self._acquire,
            Op.RELEASE: self._release,
            Op.RESERVE: self._reserve,
            Op.COMMIT: self._commit,
            Op.ABORT: self._abort,
            Op.DISCARD: self._discard,
            Op.SUSPECT: self._suspect,
            Op.STATS: self._stats,
            Op.PURGE: self._purge,
        }

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
                self._answer(protocol.decode_body(body))
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
        if self._is_busy:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def _answer(self, message: list[object]) -> None:
        op, *arguments = message
        if op == Op.HELLO:
            self._hello(arguments)
            return
        handler = self._handlers.get(protocol.as_int(op))
        if handler is None or self.holder is None:
            raise ProtocolViolation(f"operation {op} out of turn")
        result = handler(arguments)
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
            self._transport.write(protocol.encode_frame([int(status), value]))

    def _hello(self, arguments: list[object]) -> None:
        match arguments:
            case [protocol.VERSION, str() as holder, int() as block_bytes]:
                pass
            case _:
                self._reply(Status.REFUSED, f"this kvd speaks version {protocol.VERSION}")
                return
        if self.holder is not None or block_bytes < 1:
            raise ProtocolViolation("a second or senseless greeting")
        try:
            self._cache.accept_layout(block_bytes, self._server.num_holders)
        except LayoutMismatch as error:
            log.warning("holder_refused", holder=holder, reason=str(error))
            self._reply(Status.LAYOUT_MISMATCH, [error.wanted_bytes, error.served_bytes])
            return
        self.holder = holder[: protocol.MAX_HOLDER_CHARS]
        log.info("holder_joined", holder=self.holder)
        server = self._server
        value = [server.session, self._cache.slot_bytes, server.slab_bytes]
        self._send_with_slab(protocol.encode_frame([int(Status.OK), value]))

    def _send_with_slab(self, frame: bytes) -> None:
        # The first bytes on this connection: the socket's buffer is empty and takes them whole.
        if self._transport is None:
            return
        fd = os.dup(self._transport.get_extra_info("socket").fileno())
        with socket.socket(fileno=fd) as raw, contextlib.suppress(OSError):
            socket.send_fds(raw, [frame], [self._server.slab_fd])

    def _find(self, arguments: list[object]) -> Reply:
        (keys,) = protocol.as_arguments(arguments, 1)
        return Status.OK, self._cache.find(protocol.as_keys(keys))

    def _acquire(self, arguments: list[object]) -> Reply | Coroutine[None, None, Reply]:
        raw_keys, raw_ttl_s, raw_wait_s = protocol.as_arguments(arguments, 3)
        keys, ttl_s = protocol.as_keys(raw_keys), protocol.as_seconds(raw_ttl_s)
        wait_s = protocol.as_seconds(raw_wait_s)
        if self._cache.needs_promotion(keys):
            return self._acquire_later(keys, ttl_s, wait_s)
        acquired = self._cache.acquire(keys, self._holder_id, ttl_s, frozenset())
        return Status.OK, _pack_lease(acquired)

    async def _acquire_later(self, keys: list[bytes], ttl_s: float, wait_s: float) -> Reply:
        acquired = await self._cache.promote_and_acquire(keys, self._holder_id, ttl_s, wait_s)
        return Status.OK, _pack_lease(acquired)

    def _release(self, arguments: list[object]) -> Reply:
        complete = protocol.with_defaults(arguments, None, 0, 0)
        lease_id, num_bytes, raw_load_s = protocol.as_arguments(complete, 3)
        self._cache.release(protocol.as_int(lease_id), self._holder_id)
        load_s = protocol.as_seconds(raw_load_s)
        self._cache.count_moves(is_load=True, num_bytes=protocol.as_int(num_bytes), seconds=load_s)
        return Status.OK, None

    def _reserve(self, arguments: list[object]) -> Reply | Coroutine[None, None, Reply]:
        complete = protocol.with_defaults(arguments, None, None, None, b"")
        raw_keys, raw_ttl_s, raw_lifetime_s, owner = protocol.as_arguments(complete, 4)
        keys, ttl_s = protocol.as_keys(raw_keys), protocol.as_seconds(raw_ttl_s)
        lifetime_s = None if raw_lifetime_s is None else protocol.as_seconds(raw_lifetime_s)
        wish = ReserveWish(keys, ttl_s, lifetime_s, protocol.as_owner(owner))
        num_blocks = self._cache.count_missing(keys)
        if not self._cache.write_back.make_room(num_blocks):
            return self._reserve_later(wish, num_blocks)
        return self._reserve_now(wish)

    async def _reserve_later(self, wish: ReserveWish, num_blocks: int) -> Reply:
        deadline_s = asyncio.get_running_loop().time() + wish.ttl_s
        await self._cache.write_back.wait_for_room(num_blocks, deadline_s)
        return self._reserve_now(wish)

    def _reserve_now(self, wish: ReserveWish) -> Reply:
        blocks = self._cache.reserve(wish, self._holder_id)
        return Status.OK, [None if b is None else [b.slot, b.generation] for b in blocks]

    def _commit(self, arguments: list[object]) -> Reply:
        raw_rows, raw_store_s = protocol.as_arguments(protocol.with_defaults(arguments, None, 0), 2)
        rows, store_s = protocol.as_rows(raw_rows, 5), protocol.as_seconds(raw_store_s)
        num_bytes = sum(row[3] for row in rows)
        self._cache.count_moves(is_load=False, num_bytes=num_bytes, seconds=store_s)
        return Status.OK, self._cache.commit(rows, self._holder_id)

    def _abort(self, arguments: list[object]) -> Reply:
        (rows,) = protocol.as_arguments(arguments, 1)
        self._cache.abort(protocol.as_rows(rows, 2), self._holder_id)
        return Status.OK, None

    def _discard(self, arguments: list[object]) -> Reply:
        (keys,) = protocol.as_arguments(arguments, 1)
        self._cache.discard(protocol.as_keys(keys))
        return Status.OK, None

    def _suspect(self, arguments: list[object]) -> Reply:
        key, generation = protocol.as_arguments(arguments, 2)
        self._cache.suspect(protocol.as_keys([key])[0], protocol.as_int(generation))
        return Status.OK, None

    def _purge(self, arguments: list[object]) -> Reply:
        (owner,) = protocol.as_arguments(arguments, 1)
        return Status.OK, self._cache.purge(protocol.as_owner(owner))

    def _stats(self, arguments: list[object]) -> Reply:
        protocol.as_arguments(arguments, 0)
        return Status.OK, self._cache.stats(self._server.num_holders).to_map()


def _pack_lease(acquired: Acquired) -> list[object]:
    rows = []
    for block, tier in zip(acquired.blocks, acquired.tiers, strict=True):
        if block.stamp is not None:
            stamp, is_nvme = block.stamp, int(tier is Tier.NVME)
            numbers = [stamp.num_tokens, stamp.num_bytes]
            rows.append([block.slot, block.generation, stamp.checksum, is_nvme, *numbers])
    return [acquired.lease_id, rows]
