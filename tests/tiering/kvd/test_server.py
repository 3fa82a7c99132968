"""The daemon's own tasks: one that ends by a fault is not missed in silence."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiering.kvd.node_cache import NodeCache
from tiering.kvd.nvme_tier import NvmeTier
from tiering.kvd.peers import Peers
from tiering.kvd.server import KvdServer
from tiering.kvd.write_back import CacheLimits
from tiering.stores.dram_slab import create_slab_memory, map_slab_memory
from tiering.transports.tcp_transport import TcpTransport

SLAB_BYTES = 1 << 20


@pytest.fixture
def slab_fd() -> Iterator[int]:
    slab_fd = create_slab_memory(SLAB_BYTES)
    yield slab_fd
    os.close(slab_fd)


@pytest.fixture
def cache(slab_fd: int) -> NodeCache:
    memory = map_slab_memory(slab_fd, SLAB_BYTES, is_owner=True)
    return NodeCache(memory, NvmeTier(None), CacheLimits())


@pytest.fixture
async def server(slab_fd: int, cache: NodeCache) -> KvdServer:
    return KvdServer(cache, slab_fd, SLAB_BYTES, Peers(cache, TcpTransport(b"", 1.0)))


async def test_a_daemon_whose_upkeep_ended_by_a_fault_says_so(
    server: KvdServer, cache: NodeCache, tmp_path: Path
) -> None:
    failed = asyncio.Event()
    await server.start(tmp_path / "kvd.sock", failed.set)
    del cache._nvme  # what expiry looks at next
    await asyncio.wait_for(failed.wait(), 10)
    await server.stop()


async def test_a_daemon_that_is_stopped_has_not_failed(server: KvdServer, tmp_path: Path) -> None:
    failed = asyncio.Event()
    await server.start(tmp_path / "kvd.sock", failed.set)
    await server.stop()
    assert not failed.is_set()
