"""`python -m tiering.kvd`: the cache daemon of one node, configured by POINTSMAN_KVD_*."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import structlog
from pydantic import ValidationError

from tiering.errors import KvdAlreadyRunning, TransportMissing
from tiering.eviction.policies import new_evictor_of
from tiering.kvd.disk_health import DiskLimits
from tiering.kvd.node_cache import NodeCache
from tiering.kvd.nvme_limits import NvmeLimits
from tiering.kvd.nvme_tier import NvmeTier
from tiering.kvd.peer_library import PeerLibrary
from tiering.kvd.peers import Peers
from tiering.kvd.server import KvdServer, remove_stale_socket
from tiering.kvd.write_back import CacheLimits
from tiering.settings import KvdSettings, find_unknown_names
from tiering.stores.dram_slab import create_slab_memory, map_slab_memory
from tiering.stores.nvme_slab import NvmeSlab
from tiering.transports.block_transport import BlockTransport
from tiering.transports.nixl_agent import NixlAgent
from tiering.transports.nixl_transport import NixlPusher, NixlTransport
from tiering.transports.tcp_server import BlockPusher, TcpBlockServer
from tiering.transports.tcp_transport import TcpTransport

log = structlog.get_logger(__name__)


_LONGEST_RETRY_PAUSES = 16


def nvme_limits(settings: KvdSettings) -> NvmeLimits:
    """The NVMe tier's part of the settings."""
    return NvmeLimits(
        new_evictor=new_evictor_of(settings.nvme_eviction, settings.idle_ttl_s),
        tenant_share=settings.tenant_share,
        disk=DiskLimits(retry_s=settings.nvme_retry_s, slow_io_s=settings.nvme_slow_io_s),
        write_bytes_per_day=settings.nvme_write_bytes_per_day or None,
        max_writes_per_hit=settings.nvme_max_writes_per_hit,
        compression=settings.nvme_compression,
    )


def cache_limits(settings: KvdSettings) -> CacheLimits:
    """The DRAM tier's part of the settings."""
    return CacheLimits(
        high_watermark=settings.high_watermark,
        low_watermark=settings.low_watermark,
        io_timeout_s=settings.io_timeout_s,
        room_wait_s=settings.room_wait_s,
        new_evictor=new_evictor_of(settings.dram_eviction, settings.idle_ttl_s),
        tenant_share=settings.tenant_share,
    )


def start_lending(
    library: PeerLibrary, settings: KvdSettings, secret: bytes, pusher: BlockPusher | None
) -> TcpBlockServer | None:
    """Let other nodes pull from here; None when they may not, or the address cannot be had."""
    if settings.peer_port is None:
        return None
    host = settings.peer_host
    port, stall_s = settings.peer_port, settings.peer_stall_s
    server = TcpBlockServer(host, port, secret, library, stall_s, pusher=pusher)
    try:
        port = server.start()
    except OSError as error:
        log.error("peers_cannot_connect", host=host, port=settings.peer_port, error=str(error))
        return None
    shown = f"[{host}]" if ":" in host else host
    library.address = settings.peer_advertise or f"{shown}:{port}"
    log.info("peers_may_connect", address=library.address, has_secret=bool(secret))
    return server


def make_transport(
    settings: KvdSettings, secret: bytes
) -> tuple[BlockTransport, BlockPusher | None]:
    """What asks peers, and what serves those that ask the same way; TCP is always served.

    Raises:
        TransportMissing: the library of the one that was chosen is not here.
    """
    if settings.peer_transport == "tcp":
        return TcpTransport(secret, settings.peer_stall_s), None
    agent = NixlAgent()
    return NixlTransport(agent, secret, settings.peer_stall_s), NixlPusher(agent)


async def open_nvme(cache: NodeCache, path: Path, num_bytes: int) -> bool:
    """Take the slab file into use; False, with a log line, when that cannot be done now."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        slab = await asyncio.to_thread(NvmeSlab, path, num_bytes)
    except OSError as error:
        log.warning("nvme_unusable", path=str(path), error=str(error))
        return False
    return await cache.attach_nvme(slab)


async def keep_trying_nvme(cache: NodeCache, settings: KvdSettings, path: Path) -> None:
    """Open a slab file that could not be used at start, ever less often."""
    pause_s = settings.nvme_retry_s
    await asyncio.sleep(pause_s)
    while not await open_nvme(cache, path, settings.nvme_bytes):
        pause_s = min(2 * pause_s, _LONGEST_RETRY_PAUSES * settings.nvme_retry_s)
        await asyncio.sleep(pause_s)


async def serve(settings: KvdSettings) -> bool:
    """Serve until SIGTERM or SIGINT, then write DRAM back and leave nothing behind.

    False when a fault of ours ended it.
    """
    stopping, failed = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stopping.set)
    remove_stale_socket(settings.socket)
    slab_fd = create_slab_memory(settings.dram_bytes)
    slab_bytes = os.fstat(slab_fd).st_size
    memory = map_slab_memory(slab_fd, slab_bytes, is_owner=True)
    nvme = NvmeTier(None, nvme_limits(settings))
    cache = NodeCache(memory, nvme, cache_limits(settings))
    retrying = None
    path = settings.nvme_path if settings.nvme_bytes else None
    if path is not None and not await open_nvme(cache, path, settings.nvme_bytes):
        retrying = asyncio.ensure_future(keep_trying_nvme(cache, settings, path))
    secret = settings.peer_secret.get_secret_value().encode()
    transport, pusher = make_transport(settings, secret)
    server = KvdServer(cache, slab_fd, slab_bytes, Peers(cache, transport))

    def on_failure() -> None:
        failed.set()
        stopping.set()

    await server.start(settings.socket, on_failure)
    lender = start_lending(server.library, settings, secret, pusher)
    log.info("kvd_ready", socket=str(settings.socket), dram_bytes=slab_bytes)
    await stopping.wait()
    if retrying is not None:
        retrying.cancel()
    if lender is not None:
        lender.stop()
    await server.stop()
    await cache.flush(time.monotonic() + settings.flush_timeout_s)
    nvme.close()
    log.info("kvd_stopped")
    if nvme.has_stuck_io:
        sys.stdout.flush()
        os._exit(int(failed.is_set()))  # a thread inside a disk call that hangs cannot be joined
    return not failed.is_set()


def main() -> int:
    """Exit status: 0 after a signal, 1 without socket or memory or after a fault, 2 on wrong settings."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=sys.stdout),
    )
    unknown = find_unknown_names(os.environ)
    if unknown:
        log.error("settings_refused", unknown=unknown)
        return 2
    try:
        settings = KvdSettings()
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        log.error("settings_refused", errors=errors)
        return 2
    try:
        is_well = asyncio.run(serve(settings))
    except KvdAlreadyRunning as error:
        log.error("kvd_already_running", socket=error.socket_path)
        return 1
    except TransportMissing as error:
        log.error("settings_refused", error=str(error))
        return 2
    except OSError as error:
        log.error("kvd_cannot_start", socket=str(settings.socket), error=str(error))
        return 1
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
