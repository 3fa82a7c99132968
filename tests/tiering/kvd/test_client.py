"""Holders against a real kvd process, DRAM only."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from tiering.errors import KvdUnavailable, LayoutMismatch
from tiering.kvd.client import KvdClient
from tiering.lease import Reservation

if TYPE_CHECKING:
    from conftest import KvdProcess

BLOCK_BYTES = 10_000
ByteArray = npt.NDArray[np.uint8]
Eventually = Callable[[Callable[[], bool]], None]


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def keys_of(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def payload_of(key: bytes) -> ByteArray:
    rng = np.random.default_rng(int.from_bytes(key, "big"))
    return rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def put(client: KvdClient, keys: list[bytes], *, lifetime_s: float | None = None) -> int:
    reserved = [r for r in client.reserve(keys, lifetime_s=lifetime_s) if r is not None]
    for reservation in reserved:
        client.write(reservation, payload_of(reservation.key), 16)
    return client.commit(reserved)


def check(client: KvdClient, keys: list[bytes]) -> int:
    """Acquire, compare every byte, release; returns the length of the run."""
    lease = client.acquire(keys)
    into = np.empty(BLOCK_BYTES, dtype=np.uint8)
    for index, block in enumerate(lease.blocks):
        assert block.key == keys[index]
        assert client.load(lease, index, into)
        assert (into == payload_of(block.key)).all()
    client.release(lease)
    return len(lease.blocks)


def only(reservations: list[Reservation | None]) -> Reservation:
    (reservation,) = reservations
    assert reservation is not None
    return reservation


def test_blocks_come_back_byte_for_byte_and_nothing_stays_leased(kvd: KvdProcess) -> None:
    kvd.start()
    client = kvd.client()
    keys = keys_of(*range(16))
    assert client.find(keys) == 0
    assert put(client, keys) == 16
    assert client.find(keys) == 16
    assert check(client, keys) == 16
    stats = client.stats()
    assert (stats.num_leases, stats.num_reservations, stats.block_bytes) == (0, 0, BLOCK_BYTES)
    assert stats.tiers["dram"].slots_by_state["ready"] == 16
    assert stats.tiers["dram"].num_hits == 16
    assert stats.tiers["nvme"].health == "off"


def test_the_run_ends_at_the_first_absent_block(kvd: KvdProcess) -> None:
    kvd.start()
    client = kvd.client()
    put(client, keys_of(1, 2, 4))
    assert client.find(keys_of(1, 2, 3, 4)) == 2
    assert check(client, keys_of(1, 2, 3, 4)) == 2
    assert check(client, keys_of(3, 4)) == 0
    assert client.find([]) == 0
    assert check(client, []) == 0


def test_two_holders_share_blocks_through_the_slab(kvd: KvdProcess) -> None:
    kvd.start()
    prefill, decode = kvd.client("prefill"), kvd.client("decode")
    put(prefill, keys_of(1, 2, 3))
    assert check(decode, keys_of(1, 2, 3)) == 3
    assert decode.reserve(keys_of(3, 4))[0] is None
    assert decode.stats().num_holders == 2


def test_nothing_is_visible_before_the_commit_nor_after_an_abort(kvd: KvdProcess) -> None:
    kvd.start()
    writer, reader = kvd.client("writer"), kvd.client("reader")
    reservation = only(writer.reserve(keys_of(1)))
    writer.write(reservation, payload_of(key_of(1)), 16)
    assert reader.find(keys_of(1)) == 0
    assert reader.reserve(keys_of(1)) == [None]
    writer.abort([reservation])
    writer.abort([reservation])
    assert writer.commit([reservation]) == 0
    assert reader.find(keys_of(1)) == 0
    assert put(reader, keys_of(1)) == 1


def test_a_commit_after_the_reservation_ran_out_is_refused(
    kvd: KvdProcess, eventually: Eventually
) -> None:
    kvd.start()
    client = kvd.client()
    reservation = only(client.reserve(keys_of(1), ttl_s=0.2))
    client.write(reservation, payload_of(key_of(1)), 16)
    eventually(lambda: client.stats().num_reservations == 0)
    assert put(client, keys_of(1)) == 1
    assert client.commit([reservation]) == 0
    assert client.stats().num_commits_refused == 1
    assert check(client, keys_of(1)) == 1


def test_a_late_writer_does_not_touch_the_slot(kvd: KvdProcess) -> None:
    kvd.start()
    client = kvd.client()
    reservation = only(client.reserve(keys_of(1), ttl_s=0.0))
    client.write(reservation, payload_of(key_of(1)), 16)
    assert reservation.stamp is None
    assert client.commit([reservation]) == 0


def test_a_lease_that_ran_out_loads_nothing(kvd: KvdProcess, eventually: Eventually) -> None:
    kvd.start()
    client = kvd.client()
    put(client, keys_of(1))
    lease = client.acquire(keys_of(1), ttl_s=0.1)
    eventually(lambda: client.stats().num_leases == 0)
    assert not client.load(lease, 0, np.empty(BLOCK_BYTES, dtype=np.uint8))
    client.release(lease)


def test_leased_blocks_are_not_evicted_and_a_full_slab_drops_stores(kvd: KvdProcess) -> None:
    kvd.start(num_dram_slots=8)
    client = kvd.client()
    put(client, keys_of(1, 2, 3, 4))
    lease = client.acquire(keys_of(1, 2, 3, 4))
    for number in range(10, 40):
        put(client, keys_of(number))
    assert client.reserve(keys_of(*range(50, 60))).count(None) >= 6
    assert client.stats().tiers["dram"].num_stores_dropped >= 6
    assert check(client, keys_of(1, 2, 3, 4)) == 4
    client.release(lease)


def test_the_least_recently_used_blocks_go_between_the_watermarks(
    kvd: KvdProcess, eventually: Eventually
) -> None:
    kvd.start(num_dram_slots=20)
    client = kvd.client()
    for number in range(19):
        put(client, keys_of(number))
    eventually(lambda: client.stats().tiers["dram"].slots_by_state["ready"] == 16)
    assert [client.find(keys_of(number)) for number in range(19)] == [0] * 3 + [1] * 16
    assert client.stats().tiers["dram"].evictions["dropped"] == 3


def test_blocks_with_a_lifetime_vanish(kvd: KvdProcess, eventually: Eventually) -> None:
    kvd.start()
    client = kvd.client()
    put(client, keys_of(1), lifetime_s=0.2)
    put(client, keys_of(2))
    assert client.find(keys_of(1)) == 1
    eventually(lambda: client.find(keys_of(1)) == 0)
    assert client.find(keys_of(2)) == 1
    eventually(lambda: client.stats().tiers["dram"].evictions["expired"] == 1)


def test_discarded_blocks_are_gone_unless_they_are_leased(kvd: KvdProcess) -> None:
    kvd.start()
    client = kvd.client()
    put(client, keys_of(1, 2))
    lease = client.acquire(keys_of(2))
    client.discard(keys_of(1, 2, 3))
    assert client.find(keys_of(1)) == 0
    assert client.find(keys_of(2)) == 1
    client.release(lease)


def test_a_larger_block_size_is_refused_and_both_are_named(kvd: KvdProcess) -> None:
    kvd.start()
    put(kvd.client(), keys_of(1))
    with pytest.raises(LayoutMismatch, match=r"20000 bytes.*10000 bytes"):
        kvd.client(block_bytes=20_000)
    assert kvd.client().find(keys_of(1)) == 1


def test_an_idle_kvd_takes_another_block_size(kvd: KvdProcess, eventually: Eventually) -> None:
    kvd.start()
    first = kvd.client()
    put(first, keys_of(1))
    first.discard(keys_of(1))
    watcher = kvd.client()
    first.close()
    eventually(lambda: watcher.stats().num_holders == 1)
    with pytest.raises(LayoutMismatch):
        kvd.client(block_bytes=20_000)
    watcher.close()

    def can_connect() -> bool:
        try:
            kvd.client(block_bytes=20_000)
        except LayoutMismatch:
            return False
        return True

    eventually(can_connect)


HOLDER = """
import sys, time
from pathlib import Path
from tiering.kvd.client import KvdClient
client = KvdClient(Path(sys.argv[1]), 10_000, "victim")
client.connect()
ttl_s = float(sys.argv[2])
lease = client.acquire([(1).to_bytes(16, "big")], ttl_s=ttl_s)
client.reserve([number.to_bytes(16, "big") for number in range(100, 110)], ttl_s=ttl_s)
print(len(lease.blocks), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("signal_number", "ttl_s"), [(signal.SIGKILL, 600), (signal.SIGSTOP, 0.5)])
def test_a_killed_or_frozen_holder_leaks_nothing(
    kvd: KvdProcess, eventually: Eventually, signal_number: int, ttl_s: float
) -> None:
    kvd.start()
    client = kvd.client()
    put(client, keys_of(1))
    argv = [sys.executable, "-c", HOLDER, str(kvd.socket_path), str(ttl_s)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "1\n"
        os.kill(holder.pid, signal_number)
        eventually(lambda: client.stats().num_reservations == 0)
        eventually(lambda: client.stats().num_leases == 0)
        holder.kill()

    def free_and_ready() -> tuple[int, int]:
        states = client.stats().tiers["dram"].slots_by_state
        return states["free"], states["ready"]

    eventually(lambda: free_and_ready() == (31, 1))
    assert client.find(keys_of(1)) == 1
    assert put(client, keys_of(*range(100, 110))) == 10


def test_bytes_that_change_in_the_slab_are_never_given_out(kvd: KvdProcess) -> None:
    kvd.start()
    vandal, client = kvd.client("vandal"), kvd.client()
    put(vandal, keys_of(1, 2))
    lease = client.acquire(keys_of(1, 2))
    assert vandal._slab is not None
    vandal._slab.view(lease.blocks[1].slot)[BLOCK_BYTES // 2] ^= 1
    into = np.empty(BLOCK_BYTES, dtype=np.uint8)
    assert client.load(lease, 0, into)
    assert not client.load(lease, 1, into)
    client.release(lease)
    assert client.find(keys_of(1, 2)) == 1
    assert client.stats().tiers["dram"].num_checksum_failures == 1
    assert put(client, keys_of(2)) == 1


def test_a_kvd_that_is_away_is_unavailable_until_it_is_back(kvd: KvdProcess) -> None:
    kvd.start()
    client = kvd.client()
    put(client, keys_of(1))
    lease = client.acquire(keys_of(1))
    reservation = only(client.reserve(keys_of(2)))
    kvd.kill()
    with pytest.raises(KvdUnavailable):
        client.find(keys_of(1))
    with pytest.raises(KvdUnavailable, match="not connected"):
        client.find(keys_of(1))
    with pytest.raises(KvdUnavailable):
        client.connect()
    kvd.start()
    client.connect()
    put(client, keys_of(5))
    assert not client.load(lease, 0, np.empty(BLOCK_BYTES, dtype=np.uint8))
    client.release(lease)
    client.write(reservation, payload_of(key_of(2)), 16)
    assert client.commit([reservation]) == 0
    assert client.find(keys_of(2)) == 0
    assert check(client, keys_of(5)) == 1


def test_a_kvd_that_hangs_is_unavailable_in_time(kvd: KvdProcess) -> None:
    kvd.start()
    client = KvdClient(kvd.socket_path, BLOCK_BYTES, "impatient", timeout_s=0.2)
    client.connect()
    os.kill(kvd.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    with pytest.raises(KvdUnavailable):
        client.find(keys_of(1))
    with pytest.raises(KvdUnavailable):
        client.connect()
    assert time.monotonic() - began_s < 2
    os.kill(kvd.pid, signal.SIGCONT)
    client.connect()
    assert client.find(keys_of(1)) == 0
    client.close()


def test_the_socket_is_private_and_gone_after_exit(kvd: KvdProcess) -> None:
    kvd.start()
    assert kvd.socket_path.stat().st_mode & 0o777 == 0o600
    assert kvd.stop() == 0
    assert not kvd.socket_path.exists()


def test_a_dead_daemons_socket_is_replaced_and_a_living_ones_is_not(kvd: KvdProcess) -> None:
    kvd.start()
    kvd.kill()
    assert kvd.socket_path.is_socket()
    kvd.start()
    environ = os.environ | {
        "POINTSMAN_KVD_SOCKET": str(kvd.socket_path),
        "POINTSMAN_KVD_DRAM_BYTES": "65536",
    }
    argv = [sys.executable, "-m", "tiering.kvd"]
    second = subprocess.run(argv, env=environ, capture_output=True, timeout=30, check=False)
    assert second.returncode == 1
    assert b"kvd_already_running" in second.stdout
    assert kvd.client().find(keys_of(1)) == 0


def test_wrong_settings_are_refused_with_status_2(tmp_path: Path) -> None:
    environ = os.environ | {"POINTSMAN_KVD_DRAM_BYTES": "1", "POINTSMAN_KVD_SOCKET": "/s"}
    argv = [sys.executable, "-m", "tiering.kvd"]
    for extra in ({}, {"POINTSMAN_KVD_DRAM_BYTE": "8192"}):
        ended = subprocess.run(
            argv, env=environ | extra, capture_output=True, timeout=30, check=False, cwd=Path.cwd()
        )
        assert ended.returncode == 2
        assert b"settings_refused" in ended.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\0\0\0\1\xc1",
        b"\0\0\0\1\x90",
        b"\0\0\0\2\x91\x02",
        b"\0\0\0\5\x94\x01\x01\xa1x",
    ],
)
def test_garbage_ends_its_own_connection_and_no_other(kvd: KvdProcess, garbage: bytes) -> None:
    kvd.start()
    client = kvd.client()
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(10)
        raw.connect(str(kvd.socket_path))
        raw.sendall(garbage)
        raw.shutdown(socket.SHUT_WR)
        try:
            while raw.recv(4096):
                pass
        except ConnectionResetError:
            pass
    assert put(client, keys_of(1)) == 1


def test_a_holder_that_never_reads_does_not_grow_the_daemon(
    kvd: KvdProcess, eventually: Eventually
) -> None:
    kvd.start()
    flooder, client = kvd.client("flooder"), kvd.client()
    raw = flooder._connection._socket
    assert raw is not None
    raw.settimeout(0.2)
    frame = b"\0\0\0\2\x91\x0a"  # STATS, some hundred bytes of answer each
    with pytest.raises(TimeoutError):
        raw.sendall(frame * 1_000_000)
    assert put(client, keys_of(1)) == 1
    flooder.close()
    eventually(lambda: client.stats().num_holders == 1)
