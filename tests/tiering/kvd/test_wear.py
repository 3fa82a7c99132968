"""A running kvd that spares its disk, and one whose disk gets worse and worse."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tests.tiering.kvd.test_tenants import BLOCK_BYTES, key_of, put
from tiering.kvd.client import KvdClient
from tiering.kvd.stats import TierStats

if TYPE_CHECKING:
    from conftest import KvdProcess

Eventually = Callable[[Callable[[], bool]], None]


def nvme(client: KvdClient) -> TierStats:
    return client.stats().tiers["nvme"]


def use(client: KvdClient, numbers: Iterable[int]) -> list[int]:
    """Lease blocks one by one; those that were there."""
    found = []
    for number in numbers:
        lease = client.acquire([key_of(number)])
        client.release(lease)
        found += [number] * len(lease.blocks)
    return found


def put_singly(client: KvdClient, numbers: Iterable[int]) -> None:
    for number in numbers:
        assert put(client, range(number, number + 1)) == 1


def test_a_spent_budget_keeps_even_good_blocks_off_the_disk_at_the_end_too(
    kvd: KvdProcess,
) -> None:
    budget_bytes = 10 * 12_288
    kvd.start(num_dram_slots=8, num_nvme_slots=64, nvme_write_bytes_per_day=budget_bytes)
    client = kvd.client()
    for number in range(60):
        put_singly(client, [number])
        use(client, [number])
    stats = nvme(client)
    assert stats.slots_by_state["ready"] == 10, "whole slots are written, whatever is in them"
    assert stats.num_stores_dropped > 10
    assert stats.health == "on"
    assert kvd.stop() == 0  # writes DRAM back, or would
    kvd.start(num_dram_slots=8, num_nvme_slots=64)
    assert nvme(kvd.client()).slots_by_state["ready"] == 10


def filtered(kvd: KvdProcess) -> KvdClient:
    """A daemon of 16 NVMe slots that turns blocks away."""
    kvd.start(num_dram_slots=8, num_nvme_slots=16)
    client = kvd.client()
    put_singly(client, range(200))
    assert nvme(client).is_admission_filtered
    return client


def test_hits_let_every_block_pass_again(kvd: KvdProcess, eventually: Eventually) -> None:
    client = filtered(kvd)
    kept = use(client, range(200))  # more than DRAM holds

    def is_open() -> bool:
        """What is on the disk is read in turns, then a block is offered."""
        use(client, kept)
        put_singly(client, [next(fresh)])
        return not nvme(client).is_admission_filtered

    fresh = iter(range(1000, 9000))
    eventually(is_open)


def test_the_last_blocks_before_the_end_are_written_whatever_the_filter_says(
    kvd: KvdProcess,
) -> None:
    client = filtered(kvd)
    put_singly(client, range(500, 503))
    assert kvd.stop() == 0
    kvd.start(num_dram_slots=8, num_nvme_slots=16)
    assert use(kvd.client(), range(500, 503)) == [500, 501, 502]


def test_a_disk_that_is_too_slow_takes_no_more_blocks_and_then_gives_none(
    kvd: KvdProcess, eventually: Eventually
) -> None:
    kvd.start(num_dram_slots=6, num_nvme_slots=64, nvme_slow_io_s=1e-9, nvme_retry_s=600)
    client = kvd.client()
    numbers = iter(range(10_000))

    def is_read_only() -> bool:
        put_singly(client, [next(numbers)])
        return nvme(client).health == "read_only"

    eventually(is_read_only)
    on_disk = nvme(client).slots_by_state["ready"]
    assert on_disk > 4
    assert use(client, range(on_disk)) == [0, 1, 2, 3], "served until the fourth slow read"
    assert nvme(client).health == "off"
    put_singly(client, range(20_000, 20_100))
    assert use(client, [20_099]) == [20_099]
    assert nvme(client).stores.num_bytes == on_disk * BLOCK_BYTES
    assert [e["health"] for e in kvd.find_events("nvme_degraded")] == ["read_only", "off"]
    assert kvd.stop() == 0
