"""`python -m tiering.kvd`: the cache daemon of one node, configured by POINTSMAN_KVD_*."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

import structlog
from pydantic import ValidationError

from tiering.errors import KvdAlreadyRunning
from tiering.kvd.node_cache import NodeCache
from tiering.kvd.nvme_tier import NvmeTier
from tiering.kvd.server import KvdServer, remove_stale_socket
from tiering.kvd.write_back import CacheLimits
from tiering.settings import KvdSettings, find_unknown_names
from tiering.stores.dram_slab import create_slab_memory, map_slab_memory
from tiering.stores.nvme_slab import NvmeSlab

log = structlog.get_logger(__name__)


def open_nvme_tier(settings: KvdSettings) -> NvmeTier:
    """The configured tier; one that is off when it is not wanted or its file cannot be used."""
    if not settings.nvme_bytes or settings.nvme_path is None:
        return NvmeTier(None)
    try:
        settings.nvme_path.parent.mkdir(parents=True, exist_ok=True)
        return NvmeTier(NvmeSlab(settings.nvme_path, settings.nvme_bytes))
    except OSError as error:
        log.warning("nvme_unusable", path=str(settings.nvme_path), error=str(error))
        return NvmeTier(None)


async def serve(settings: KvdSettings) -> None:
    """Serve until SIGTERM or SIGINT, then write DRAM back and leave nothing behind."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stopping.set)
    remove_stale_socket(settings.socket)
    slab_fd = create_slab_memory(settings.dram_bytes)
    slab_bytes = os.fstat(slab_fd).st_size
    memory = map_slab_memory(slab_fd, slab_bytes, is_owner=True)
    nvme = open_nvme_tier(settings)
    await nvme.recover()
    limits = CacheLimits(
        high_watermark=settings.high_watermark,
        low_watermark=settings.low_watermark,
        io_timeout_s=settings.io_timeout_s,
        room_wait_s=settings.room_wait_s,
    )
    server = KvdServer(NodeCache(memory, nvme, limits), slab_fd, slab_bytes)
    await server.start(settings.socket)
    log.info("kvd_ready", socket=str(settings.socket), dram_bytes=slab_bytes)
    await stopping.wait()
    await server.stop()
    await server.cache.flush(time.monotonic() + settings.flush_timeout_s)
    nvme.close()
    log.info("kvd_stopped")
    if nvme.has_stuck_io:
        sys.stdout.flush()
        os._exit(0)  # a thread inside a disk call that hangs cannot be joined


def main() -> int:
    """Exit status: 0 after a signal, 1 when another kvd runs here, 2 on wrong settings."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
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
        asyncio.run(serve(settings))
    except KvdAlreadyRunning as error:
        log.error("kvd_already_running", socket=error.socket_path)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
