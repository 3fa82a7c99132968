"""Shares of tenants, and what kvd counts, on a real daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from tiering.block_hash import owner_tag
from tiering.errors import KvdUnavailable
from tiering.kvd.client import KvdClient

if TYPE_CHECKING:
    from conftest import KvdProcess

BLOCK_BYTES = 10_000
CALM, FLOOD = owner_tag(b"calm tenant"), owner_tag(b"flooding tenant")
Eventually = Callable[[Callable[[], bool]], None]


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def payload_of(key: bytes) -> npt.NDArray[np.uint8]:
    return np.full(BLOCK_BYTES, key[-1], dtype=np.uint8)


def put(client: KvdClient, numbers: range, owner: bytes = b"") -> int:
    reserved = client.reserve([key_of(number) for number in numbers], owner=owner)
    granted = [r for r in reserved if r is not None]
    for reservation in granted:
        client.write(reservation, payload_of(reservation.key), 16)
    return client.commit(granted)


def count_present(client: KvdClient, numbers: range) -> int:
    return sum(client.find([key_of(number)]) for number in numbers)


@pytest.mark.parametrize("num_nvme_slots", [0, 64])
def test_a_flood_evicts_its_own_blocks_first(kvd: KvdProcess, num_nvme_slots: int) -> None:
    kvd.start(num_dram_slots=32, num_nvme_slots=num_nvme_slots, tenant_share=0.3)
    client = kvd.client()
    assert put(client, range(8), CALM) == 8
    for start in range(1000, 1400, 4):
        put(client, range(start, start + 4), FLOOD)
    assert count_present(client, range(8)) == 8
    owners = client.stats().tiers["dram"].slots_by_owner
    assert owners[FLOOD.hex()] > 8


def test_without_a_share_a_flood_evicts_what_is_oldest(kvd: KvdProcess) -> None:
    kvd.start(num_dram_slots=32)
    client = kvd.client()
    put(client, range(8), CALM)
    for start in range(1000, 1100, 4):
        put(client, range(start, start + 4), FLOOD)
    assert count_present(client, range(8)) == 0
    assert client.stats().tiers["dram"].slots_by_owner == {}


def test_a_tenants_blocks_are_its_own_after_a_restart_and_can_be_purged(
    kvd: KvdProcess, eventually: Eventually
) -> None:
    kvd.start(num_nvme_slots=64, tenant_share=0.5)
    client = kvd.client()
    put(client, range(6), CALM)
    put(client, range(10, 16), FLOOD)
    assert kvd.stop() == 0
    kvd.start(num_nvme_slots=64, tenant_share=0.5)
    client = kvd.client()
    assert client.stats().tiers["nvme"].slots_by_owner == {CALM.hex(): 6, FLOOD.hex(): 6}
    lease = client.acquire([key_of(number) for number in range(3)])
    client.release(lease)
    assert client.purge(CALM) == 6
    assert count_present(client, range(6)) == 0
    assert count_present(client, range(10, 16)) == 6
    eventually(lambda: client.stats().tiers["nvme"].slots_by_state["ready"] == 6)
    kvd.kill()
    kvd.start(num_nvme_slots=64)
    assert count_present(kvd.client(), range(20)) == 6


def test_a_tag_of_another_length_is_refused(kvd: KvdProcess) -> None:
    kvd.start()
    client = kvd.client()
    with pytest.raises(KvdUnavailable):
        client.reserve([key_of(1)], owner=b"not eight")
    assert put(kvd.client(), range(1)) == 1


def test_an_empty_salt_has_no_tag_and_others_differ() -> None:
    assert owner_tag(b"") == b""
    assert len(CALM) == 8
    assert CALM != FLOOD


def test_moves_are_counted_with_their_bytes_and_seconds(kvd: KvdProcess) -> None:
    kvd.start(num_nvme_slots=64)
    client = kvd.client()
    put(client, range(8))
    assert kvd.stop() == 0
    kvd.start(num_nvme_slots=64)
    client = kvd.client()
    put(client, range(100, 104))
    lease = client.acquire([key_of(number) for number in range(8)])
    into = np.empty(BLOCK_BYTES, dtype=np.uint8)
    for index in range(8):
        assert client.load(lease, index, into)
    client.release(lease)
    dram, nvme = client.stats().tiers["dram"], client.stats().tiers["nvme"]
    assert (dram.loads.num_bytes, dram.stores.num_bytes) == (8 * BLOCK_BYTES, 4 * BLOCK_BYTES)
    assert nvme.loads.num_bytes == 8 * BLOCK_BYTES
    for moves in (dram.loads, dram.stores, nvme.loads):
        assert 0 < moves.seconds < 5
        assert moves.bytes_per_s > 0
    assert dram.ready_bytes == 12 * 12_288
    assert nvme.num_hits == 8


def test_a_spent_write_budget_keeps_blocks_off_the_disk(kvd: KvdProcess) -> None:
    kvd.start(num_dram_slots=8, num_nvme_slots=64, nvme_write_bytes_per_day=5 * 12_288)
    client = kvd.client()
    for number in range(100):
        put(client, range(number, number + 1))
    stats = client.stats().tiers["nvme"]
    assert stats.is_admission_filtered
    assert stats.stores.num_bytes <= 5 * 12_288
    assert client.stats().tiers["dram"].evictions["not_admitted"] > 50


def test_under_write_pressure_only_blocks_used_twice_reach_the_disk(kvd: KvdProcess) -> None:
    kvd.start(num_dram_slots=8, num_nvme_slots=16)
    client = kvd.client()
    for number in range(200):
        put(client, range(number, number + 1))
    assert client.stats().tiers["nvme"].is_admission_filtered
    num_written = client.stats().tiers["nvme"].stores.num_bytes // BLOCK_BYTES
    assert num_written < 40
    for number in range(300, 330):
        put(client, range(number, number + 1))
        client.release(client.acquire([key_of(number)]))
    assert client.stats().tiers["nvme"].stores.num_bytes // BLOCK_BYTES > num_written + 15


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfuda", "arc", "s3fifo", "ttl"])
def test_each_policy_serves_a_working_set_above_both_tiers(kvd: KvdProcess, policy: str) -> None:
    kvd.start(num_dram_slots=8, num_nvme_slots=16, dram_eviction=policy, nvme_eviction=policy)
    client = kvd.client()
    for number in range(0, 120, 4):
        put(client, range(number, number + 4))
        lease = client.acquire([key_of(n) for n in range(max(number - 4, 0), number)])
        into = np.empty(BLOCK_BYTES, dtype=np.uint8)
        for index, block in enumerate(lease.blocks):
            assert client.load(lease, index, into)
            assert (into == payload_of(block.key)).all()
        client.release(lease)
    for tier in client.stats().tiers.values():
        assert tier.num_checksum_failures == 0
        assert tier.num_leases == 0


def test_the_ttl_policy_drops_idle_blocks_without_pressure(
    kvd: KvdProcess, eventually: Eventually
) -> None:
    kvd.start(dram_eviction="ttl", idle_ttl_s=0.5)
    client = kvd.client()
    put(client, range(3))
    lease = client.acquire([key_of(0)])
    eventually(lambda: client.find([key_of(1)]) == 0)
    assert client.find([key_of(0)]) == 1
    client.release(lease)
    eventually(lambda: client.find([key_of(0)]) == 0)
