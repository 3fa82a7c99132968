"""Two real daemons: one pulls what the other has, and whatever goes wrong is a miss."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from tiering.kvd.client import KvdClient
from tiering.kvd.stats import PeerStats
from tiering.lease import PullResult

if TYPE_CHECKING:
    from conftest import KvdProcess

BLOCK_BYTES = 10_000
BIG_BYTES = 1 << 20
LIMIT_S = 20.0
PATIENT = {"peer_stall_s": 10}  # a process may get no core for seconds on a busy machine
SECRET = "known-to-both-nodes"  # noqa: S105 (of these tests alone)
Pair = tuple["KvdProcess", "KvdProcess"]
Eventually = Callable[[Callable[[], bool]], None]


def keys_of(numbers: range) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def payload_of(key: bytes, num_bytes: int = BLOCK_BYTES) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng(int.from_bytes(key, "big"))
    return rng.integers(0, 256, num_bytes, dtype=np.uint8)


def put(client: KvdClient, keys: list[bytes], num_bytes: int = BLOCK_BYTES, **more: float) -> int:
    granted = [r for r in client.reserve(keys, lifetime_s=more.get("lifetime_s")) if r is not None]
    for reservation in granted:
        client.write(reservation, payload_of(reservation.key, num_bytes), 16)
    return client.commit(granted)


def check(client: KvdClient, keys: list[bytes], num_bytes: int = BLOCK_BYTES) -> int:
    """Acquire, compare every byte, release; returns the length of the run."""
    lease = client.acquire(keys)
    into = np.empty(num_bytes, dtype=np.uint8)
    for index, block in enumerate(lease.blocks):
        assert client.load(lease, index, into)
        assert (into == payload_of(block.key, num_bytes)).all()
    client.release(lease)
    return len(lease.blocks)


def nothing_held(client: KvdClient) -> bool:
    """No lease, no reservation and no half-filled slot is left."""
    stats = client.stats()
    states = stats.tiers["dram"].slots_by_state
    return not (stats.num_leases or states["reserved"] or states["loading"])


def about(client: KvdClient, peer: str) -> PeerStats:
    return client.stats().peers[peer]


def test_a_prefix_comes_from_the_peer_that_has_it(kvds: Pair, eventually: Eventually) -> None:
    ours, theirs = kvds
    ours.start(peer_secret=SECRET, **PATIENT)
    theirs.start(peer_port=0, peer_secret=SECRET, **PATIENT)
    source, client = theirs.client(), ours.client()
    keys = keys_of(range(10))
    assert put(source, keys[:8]) == 8
    assert put(client, keys[:2]) == 2
    peer = theirs.peer_address

    (offer,) = client.survey(keys, [peer], wait_s=LIMIT_S)
    assert (offer.peer, offer.num_blocks) == (peer, 8)
    assert offer.seconds > 0
    result = client.pull(keys, [peer], wait_s=LIMIT_S)
    assert (result.num_found, result.num_blocks, result.peer) == (8, 6, peer)
    assert result.num_bytes == 6 * BLOCK_BYTES
    assert check(client, keys) == 8
    assert client.pull(keys[:8], [peer], wait_s=LIMIT_S) == PullResult(8)
    eventually(lambda: nothing_held(source) and nothing_held(client))
    lending = source.stats().lending
    assert (lending.address, lending.num_blocks) == (peer, 6)
    assert about(client, peer).num_blocks == 6
    for event in ours.events + theirs.events:
        assert SECRET not in str(event)


def test_blocks_on_the_peers_disk_come_too(kvds: Pair) -> None:
    ours, theirs = kvds
    ours.start(**PATIENT)
    theirs.start(num_nvme_slots=64, peer_port=0, **PATIENT)
    keys = keys_of(range(12))
    source = theirs.client()
    assert put(source, keys) == 12
    source.close()
    assert theirs.stop() == 0  # writes DRAM back
    theirs.start(num_nvme_slots=64, peer_port=0, **PATIENT)
    theirs.client()
    client = ours.client()
    assert client.pull(keys, [theirs.peer_address], wait_s=LIMIT_S).num_blocks == 12
    assert check(client, keys) == 12


def test_a_block_with_a_lifetime_keeps_it(kvds: Pair, eventually: Eventually) -> None:
    ours, theirs = kvds
    ours.start(**PATIENT)
    theirs.start(peer_port=0, **PATIENT)
    source, client = theirs.client(), ours.client()
    (key,) = keys_of(range(1))
    assert put(source, [key], lifetime_s=2.0) == 1
    assert client.pull([key], [theirs.peer_address], wait_s=LIMIT_S).num_blocks == 1
    eventually(lambda: client.find([key]) == 0)


def test_another_namespace_is_refused_and_both_are_named(
    kvds: Pair, eventually: Eventually
) -> None:
    ours, theirs = kvds
    ours.start(**PATIENT)
    theirs.start(peer_port=0, **PATIENT)
    source = theirs.client(namespace="model-1.L2.T16")
    client = ours.client(namespace="model-2.L2.T16")
    keys = keys_of(range(4))
    assert put(source, keys) == 4
    assert client.pull(keys, [theirs.peer_address], wait_s=LIMIT_S).num_found == 0
    eventually(lambda: len(ours.find_events("peer_failed")) == 1)
    (event,) = ours.find_events("peer_failed")
    assert "model-1.L2.T16" in event["reason"]
    assert "model-2.L2.T16" in event["reason"]


def test_another_block_size_is_refused_and_both_are_named(
    kvds: Pair, eventually: Eventually
) -> None:
    ours, theirs = kvds
    ours.start(**PATIENT)
    theirs.start(peer_port=0, **PATIENT)
    theirs.client(block_bytes=8192)
    client = ours.client()
    assert client.pull(keys_of(range(4)), [theirs.peer_address], wait_s=LIMIT_S).num_found == 0
    eventually(lambda: len(ours.find_events("peer_failed")) == 1)
    (event,) = ours.find_events("peer_failed")
    assert "10000 bytes" in event["reason"]
    assert "8192 bytes" in event["reason"]


def test_a_peer_that_fails_is_left_alone_for_a_while_and_the_next_one_is_asked(kvds: Pair) -> None:
    ours, theirs = kvds
    ours.start(**PATIENT)
    theirs.start(peer_port=0, **PATIENT)
    source, client = theirs.client(), ours.client()
    keys = keys_of(range(4))
    assert put(source, keys) == 4
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dead = f"127.0.0.1:{silent.getsockname()[1]}"
    result = client.pull(keys, [dead, theirs.peer_address], wait_s=LIMIT_S)
    assert (result.num_blocks, result.peer) == (4, theirs.peer_address)
    assert about(client, dead).num_failures == 1
    assert client.pull(keys_of(range(100, 101)), [dead], wait_s=LIMIT_S).num_found == 0
    assert about(client, dead).num_failures == 1


def test_silent_peers_do_not_hide_the_one_that_answers(kvds: Pair) -> None:
    ours, theirs = kvds
    ours.start(**PATIENT)
    theirs.start(peer_port=0, **PATIENT)
    source, client = theirs.client(), ours.client()
    keys = keys_of(range(4))
    assert put(source, keys) == 4
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for _ in range(7)
        ]
        peers = [*(f"127.0.0.1:{port}" for port in silent), theirs.peer_address]
        began_s = time.monotonic()
        offers = client.survey(keys, peers, wait_s=4.0)
        took_s = time.monotonic() - began_s
    assert [offer.num_blocks for offer in offers] == [0] * 7 + [4]
    assert took_s < LIMIT_S
    assert [about(client, peer).num_failures for peer in peers] == [1] * 7 + [0]


def test_two_holders_that_want_the_same_prefix_pull_it_once(kvds: Pair) -> None:
    ours, theirs = kvds
    ours.start(num_dram_slots=128, **PATIENT)
    theirs.start(num_dram_slots=128, peer_port=0, **PATIENT)
    source = theirs.client()
    keys = keys_of(range(60))
    assert put(source, keys) == 60
    clients = [ours.client(f"holder-{n}") for n in range(4)]
    found: list[int] = []

    def pull(client: KvdClient) -> None:
        found.append(client.pull(keys, [theirs.peer_address], wait_s=LIMIT_S).num_found)

    threads = [threading.Thread(target=pull, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert found == [60] * 4
    assert source.stats().lending.num_blocks == 60


def test_a_full_node_takes_the_head_of_the_run_and_evicts_nothing_leased(kvds: Pair) -> None:
    ours, theirs = kvds
    ours.start(num_dram_slots=16, **PATIENT)
    theirs.start(num_dram_slots=64, peer_port=0, **PATIENT)
    source, client = theirs.client(), ours.client()
    keys, mine = keys_of(range(32)), keys_of(range(100, 112))
    assert put(source, keys) == 32
    assert put(client, mine) == 12
    lease = client.acquire(mine)
    result = client.pull(keys, [theirs.peer_address], wait_s=LIMIT_S)
    assert 0 < result.num_found <= 4
    assert check(client, mine) == 12
    client.release(lease)


class Gate:
    """Stands before a peer and lets so many of its bytes through; then something happens."""

    def __init__(self, peer: str, limit_bytes: int, on_limit: Callable[[bytes], bytes]) -> None:
        host, port = peer.split(":")
        self._peer = (host, int(port))
        self._left_bytes = limit_bytes
        self._on_limit = on_limit
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                down, _ = self._listener.accept()
                up = socket.create_connection(self._peer)
                self._sockets += [down, up]
                threading.Thread(target=self._forward, args=(down, up), daemon=True).start()
                threading.Thread(target=self._measure, args=(up, down), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                target.sendall(data)

    def _measure(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError), target:
            while data := source.recv(65_536):
                if len(data) >= self._left_bytes:
                    data = self._on_limit(data)
                    self._left_bytes = 1 << 60
                self._left_bytes -= len(data)
                target.sendall(data)


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("what", ["killed", "frozen", "corrupting", "cut off"])
def test_a_peer_that_fails_in_the_middle_costs_a_recompute_within_the_deadline(
    kvds: Pair, eventually: Eventually, what: str
) -> None:
    ours, theirs = kvds
    num_blocks, wait_s = 40, 15.0
    ours.start(dram_bytes=2 * num_blocks * BIG_BYTES, peer_stall_s=3)
    theirs.start(dram_bytes=2 * num_blocks * BIG_BYTES, peer_port=0, **PATIENT)
    source = theirs.client(block_bytes=BIG_BYTES)
    client = ours.client(block_bytes=BIG_BYTES)
    keys = keys_of(range(num_blocks))
    assert put(source, keys, BIG_BYTES) == num_blocks
    pid = theirs.pid

    def fail(data: bytes) -> bytes:
        if what == "corrupting":
            return flipped(data)
        if what == "cut off":
            raise OSError("the line is cut")
        os.kill(pid, signal.SIGKILL if what == "killed" else signal.SIGSTOP)
        return data

    gate = Gate(theirs.peer_address, num_blocks * BIG_BYTES // 2, fail)
    began_s = time.monotonic()
    result = client.pull(keys, [gate.address], wait_s=wait_s)
    took_s = time.monotonic() - began_s
    gate.close()
    num_here = check(client, keys, BIG_BYTES)  # every byte that is shown is right
    assert num_here == result.num_found
    assert 0 < num_here < num_blocks
    assert took_s < wait_s
    eventually(lambda: nothing_held(client))
    peer = about(client, gate.address)
    assert (peer.num_failures, peer.num_corrupt) == (1, int(what == "corrupting"))
    assert put(client, keys, BIG_BYTES) == num_blocks - num_here  # the rest is computed here
    if what == "frozen":
        os.kill(pid, signal.SIGCONT)
