"""The Unix socket of kvd: one connection per holder, one request at a time on each."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import structlog

from tiering.errors import KvdAlreadyRunning
from tiering.kvd.holder_connection import HolderConnection
from tiering.kvd.node_cache import NodeCache
from tiering.kvd.peer_library import PeerLibrary
from tiering.kvd.peers import Peers

log = structlog.get_logger(__name__)

_PROBE_TIMEOUT_S = 1.0
_TICK_S = 0.1


class KvdServer:
    """Listens on a socket path, owner only, and serves one `NodeCache`.

    `slab_fd` is the memfd that the cache maps, `slab_bytes` its length; it stays the caller's.
    """

    def __init__(self, cache: NodeCache, slab_fd: int, slab_bytes: int, peers: Peers) -> None:
        self.cache = cache
        self.peers = peers
        self.library = PeerLibrary(cache)
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
        """Connections that have shaken hands as holders of blocks."""
        joined = (c for c in self.connections.values() if c.holder is not None)
        return sum(not connection.is_operator for connection in joined)

    async def start(self, socket_path: Path, on_failure: Callable[[], None]) -> None:
        """Bind and listen; a dead daemon's socket file is replaced.

        `on_failure` is called when eviction or expiry has ended by a fault: without them the daemon would
        look alive, and have no room or leases without end.

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

        def note_end(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                log.critical("kvd_upkeep_ended", exc_info=task.exception())
                on_failure()

        for task in self._upkeep:
            task.add_done_callback(note_end)

    async def stop(self) -> None:
        """Refuse new holders, break off the others, remove the socket file."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections.values()):
            connection.abort()
        for task in self._upkeep:
            task.cancel()
        await asyncio.gather(*self._upkeep, return_exceptions=True)
        self.peers.close()
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
