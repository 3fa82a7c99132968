"""Two real daemons whose blocks come by NIXL. Without its library there is one thing to test."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from tiering.kvd.client import KvdClient

if TYPE_CHECKING:
    from conftest import KvdProcess

BLOCK_BYTES = 3_000_000  # several rounds of the transport's buffer
NUM_BLOCKS = 7
DRAM_BYTES = 16 * 3_002_368
KEYS = [number.to_bytes(16, "big") for number in range(NUM_BLOCKS)]
NIXL: dict[str, object] = {"peer_transport": "nixl", "peer_stall_s": 10}
has_nixl = importlib.util.find_spec("nixl") is not None
needs_nixl = pytest.mark.skipif(not has_nixl, reason="the extra nixl is not installed")
Pair = tuple["KvdProcess", "KvdProcess"]


@pytest.fixture
def lo(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX would use every network device of the machine."""
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.setenv("UCX_TLS", "tcp")


def payload_of(key: bytes) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng(int.from_bytes(key, "big"))
    return rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def pair(kvds: Pair, **ours: object) -> tuple[KvdClient, str]:
    """A daemon that lends all blocks, and one that has none; a holder of the second."""
    borrower, lender = kvds
    lender.start(dram_bytes=DRAM_BYTES, peer_port=0, **NIXL)  # type: ignore[arg-type]
    borrower.start(dram_bytes=DRAM_BYTES, **(NIXL | ours))  # type: ignore[arg-type]
    source = lender.client(block_bytes=BLOCK_BYTES)
    granted = [r for r in source.reserve(KEYS) if r is not None]
    for reservation in granted:
        source.write(reservation, payload_of(reservation.key), 16)
    assert source.commit(granted) == NUM_BLOCKS
    return borrower.client(block_bytes=BLOCK_BYTES), lender.peer_address


def check(client: KvdClient) -> int:
    lease = client.acquire(KEYS)
    into = np.empty(BLOCK_BYTES, dtype=np.uint8)
    for index, block in enumerate(lease.blocks):
        assert client.load(lease, index, into)
        assert (into == payload_of(block.key)).all()
    client.release(lease)
    return len(lease.blocks)


@needs_nixl
@pytest.mark.usefixtures("lo")
def test_a_prefix_comes_in_several_rounds(kvds: Pair) -> None:
    client, peer = pair(kvds)
    assert client.pull(KEYS, [peer], wait_s=20).num_blocks == NUM_BLOCKS
    assert check(client) == NUM_BLOCKS


@needs_nixl
@pytest.mark.usefixtures("lo")
def test_a_daemon_that_asks_over_tcp_is_served_all_the_same(kvds: Pair) -> None:
    client, peer = pair(kvds, peer_transport="tcp")
    assert client.pull(KEYS, [peer], wait_s=20).num_blocks == NUM_BLOCKS
    assert check(client) == NUM_BLOCKS


@needs_nixl
@pytest.mark.usefixtures("lo")
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_peer_that_freezes_or_dies_costs_no_more_than_the_deadline(
    kvds: Pair, number: signal.Signals
) -> None:
    client, peer = pair(kvds)
    lender = kvds[1]
    assert client.pull(KEYS[:1], [peer], wait_s=20).num_blocks == 1  # they know each other
    os.kill(lender.pid, number)
    began_s = time.monotonic()
    assert client.pull(KEYS, [peer], wait_s=1).num_blocks == 0
    assert time.monotonic() - began_s < 10
    if number is signal.SIGSTOP:
        os.kill(lender.pid, signal.SIGCONT)
    assert check(client) == 1


@pytest.mark.skipif(has_nixl, reason="it is installed here")
def test_without_the_library_the_daemon_says_so_at_its_start(tmp_path: Path) -> None:
    environ = os.environ | {
        "POINTSMAN_KVD_SOCKET": str(tmp_path / "kvd.sock"),
        "POINTSMAN_KVD_DRAM_BYTES": "65536",
        "POINTSMAN_KVD_PEER_TRANSPORT": "nixl",
    }
    argv = [sys.executable, "-m", "tiering.kvd"]
    ended = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "transport nixl cannot be used" in ended.stdout
