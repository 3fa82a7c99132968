"""Which unit of the slab file is emptied next."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tiering.block_stamp import BlockStamp
from tiering.eviction.lru import LruEvictor
from tiering.kvd.nvme_limits import NvmeLimits
from tiering.kvd.nvme_tier import NvmeTier, Source, StoreResult
from tiering.kvd.unit_order import UnitOrder
from tiering.stores.block_store import payload_checksum
from tiering.stores.nvme_slab import NvmeSlab

BLOCK_BYTES = 4096


def source_of(number: int, owner: bytes = b"") -> Source:
    payload = np.full(BLOCK_BYTES, number % 251, dtype=np.uint8)
    key = number.to_bytes(16, "big")
    checksum = payload_checksum(payload)
    return Source(BlockStamp(key, 1, 16, BLOCK_BYTES, checksum, owner), payload)


def present(tier: NvmeTier, numbers: range) -> int:
    return sum(tier.has(number.to_bytes(16, "big")) for number in numbers)


def test_a_unit_is_as_young_as_its_youngest_block() -> None:
    order = UnitOrder(3, 4, LruEvictor)
    for slot in range(12):
        order.use(slot)
    order.use(1)
    assert list(order.pop_victims()) == [range(4, 8), range(8, 12), range(4)]
    assert list(order.pop_victims()) == []


@pytest.fixture
def slab(tmp_path: Path) -> NvmeSlab:
    made = NvmeSlab(tmp_path / "slab", 4096 + 64 * 8192)
    made.lay_out(BLOCK_BYTES)
    assert (made.unit_slots, made.num_slots) == (4, 100)
    return made


async def test_a_full_tier_gives_up_the_unit_that_was_idle_longest(slab: NvmeSlab) -> None:
    tier = NvmeTier(slab)
    await tier.recover()
    for first in range(0, 100, 4):  # one unit after the other, so that their order is known
        await tier.store_all([source_of(number) for number in range(first, first + 4)])
    tier.prolong((1).to_bytes(16, "big"))
    block = tier.pin((5).to_bytes(16, "big"))
    assert block is not None
    assert await tier.fetch(block, np.empty(BLOCK_BYTES, dtype=np.uint8)) is not None
    results = await tier.store_all([source_of(200)])
    assert results == [StoreResult.STORED]
    assert [present(tier, range(n, n + 4)) for n in (0, 4, 8, 12)] == [4, 4, 0, 4]
    assert tier.stats().evictions["capacity"] == 4
    tier.close()


async def test_a_block_that_is_being_read_keeps_its_slot(slab: NvmeSlab) -> None:
    tier = NvmeTier(slab)
    await tier.recover()
    await tier.store_all([source_of(number) for number in range(100)])
    block = tier.pin((2).to_bytes(16, "big"))
    assert block is not None
    await tier.store_all([source_of(number) for number in range(200, 299)])
    into = np.empty(BLOCK_BYTES, dtype=np.uint8)
    assert await tier.fetch(block, into) is not None
    assert (into == 2).all()
    assert present(tier, range(200, 299)) == 99
    tier.close()


async def test_a_tenant_above_its_share_gives_up_its_own_blocks_only(slab: NvmeSlab) -> None:
    tier = NvmeTier(slab, NvmeLimits(tenant_share=0.5))
    await tier.recover()
    await tier.store_all([source_of(number, b"calmness") for number in range(40)])
    await tier.store_all([source_of(number, b"flooding") for number in range(100, 160)])
    await tier.store_all([source_of(number, b"flooding") for number in range(200, 210)])
    assert present(tier, range(200, 210)) == 10
    assert present(tier, range(40)) == 40
    assert present(tier, range(100, 160)) == 50  # units are published as their writes end
    tier.close()
