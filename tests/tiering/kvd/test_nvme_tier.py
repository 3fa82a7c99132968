"""The NVMe tier over a disk that fails or hangs (a real slab whose system calls are made to)."""

from __future__ import annotations

import asyncio
import errno
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tiering.block_layout import BlockLayout
from tiering.block_stamp import BlockStamp
from tiering.errors import SlotCorrupt
from tiering.kvd.node_cache import NodeCache, ReserveWish
from tiering.kvd.nvme_limits import NvmeLimits
from tiering.kvd.nvme_tier import NvmeHealth, NvmeTier, StoreResult
from tiering.kvd.write_back import CacheLimits
from tiering.stores.block_store import ByteArray, payload_checksum
from tiering.stores.nvme_slab import NvmeSlab

BLOCK_BYTES = 4096
HOLDER = 1
LAYOUT = BlockLayout(num_layers=2, block_tokens=16, num_kv_heads=1, head_dim=16, dtype="float32")


class SickSlab(NvmeSlab):
    """A slab on a disk that answers with `error_number`, or not before `may_answer` is set."""

    error_number = 0
    is_cuttable = True

    def __init__(self, path: Path, num_bytes: int) -> None:
        super().__init__(path, num_bytes)
        self.may_answer = threading.Event()
        self.may_answer.set()

    def lay_out(self, block_bytes: int, form: str = "") -> None:
        if not self.is_cuttable:
            raise OSError(errno.EIO, "sick disk")
        super().lay_out(block_bytes, form)

    def write_run(
        self, slot: int, stamps: Sequence[BlockStamp], payloads: Sequence[ByteArray]
    ) -> None:
        self._fall_ill()
        super().write_run(slot, stamps, payloads)

    def read_run(
        self, slot: int, stamps: Sequence[BlockStamp], into: Sequence[ByteArray]
    ) -> list[SlotCorrupt | None]:
        self._fall_ill()
        return super().read_run(slot, stamps, into)

    def _fall_ill(self) -> None:
        self.may_answer.wait(30)
        if self.error_number:
            raise OSError(self.error_number, "sick disk")


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def make_block(number: int) -> tuple[BlockStamp, ByteArray]:
    payload = np.full(BLOCK_BYTES, number, dtype=np.uint8)
    return BlockStamp(key_of(number), 1, 16, BLOCK_BYTES, payload_checksum(payload)), payload


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[SickSlab]:
    made = SickSlab(tmp_path / "slab", 40 * 8192)
    yield made
    made.may_answer.set()
    made.close()


def is_stuck(tier: NvmeTier) -> bool:
    return tier.has_stuck_io


async def open_tier(
    slab: NvmeSlab, num_blocks: int = 0, limits: NvmeLimits | None = None
) -> NvmeTier:
    tier = NvmeTier(slab, limits)
    tier.lay_out(BLOCK_BYTES)
    for number in range(num_blocks):
        assert await tier.store(*make_block(number)) is StoreResult.STORED
    return tier


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EIO])
async def test_a_refused_write_makes_the_tier_read_only_until_its_pause_is_over(
    slab: SickSlab, error_number: int
) -> None:
    tier = await open_tier(slab, num_blocks=3)
    slab.error_number = error_number
    assert await tier.store(*make_block(9)) is StoreResult.REFUSED
    slab.error_number = 0
    tier.keep_watch(time.monotonic() + 29, io_timeout_s=2)
    assert tier.health is NvmeHealth.READ_ONLY
    assert await tier.store(*make_block(9)) is StoreResult.REFUSED
    block = tier.pin(key_of(1))
    assert block is not None
    into = np.empty(BLOCK_BYTES, dtype=np.uint8)
    assert await tier.fetch(block, into) is not None
    assert (into == 1).all()
    assert tier.stats().num_stores_dropped == 1
    tier.keep_watch(time.monotonic() + 31, io_timeout_s=2)
    assert tier.is_writable
    assert await tier.store(*make_block(9)) is StoreResult.STORED
    tier.close()


async def test_what_lies_on_a_disk_that_cannot_be_cut_anew_is_not_read_in_another_form(
    slab: SickSlab,
) -> None:
    tier = await open_tier(slab, 3, NvmeLimits(compression="int8"))
    slab.is_cuttable = False
    tier.fit(BLOCK_BYTES, LAYOUT)
    assert tier.form == "int8.v1"
    for after_s in (0, 31, 300):  # the second and the third find it on, try and fail
        tier.keep_watch(time.monotonic() + after_s, io_timeout_s=2)
        assert not tier.has(key_of(1))
        assert not tier.is_writable
    slab.is_cuttable = True
    tier.keep_watch(time.monotonic() + 1000, io_timeout_s=2)
    assert slab.layout is not None
    assert slab.layout.form == tier.form
    assert tier.is_writable
    assert not tier.has(key_of(1))
    tier.close()


async def test_a_file_that_could_not_be_cut_for_others_is_cut_for_its_own_blocks_again(
    slab: SickSlab,
) -> None:
    tier = await open_tier(slab, 3, NvmeLimits(compression="int8"))
    slab.is_cuttable = False
    tier.fit(BLOCK_BYTES, LAYOUT)
    slab.is_cuttable = True
    tier.fit(BLOCK_BYTES, None)
    tier.keep_watch(time.monotonic() + 31, io_timeout_s=2)
    assert await tier.store(*make_block(9)) is StoreResult.STORED
    tier.close()


async def test_reads_that_keep_failing_turn_the_tier_off(slab: SickSlab) -> None:
    tier = await open_tier(slab, num_blocks=12)
    slab.error_number = errno.EIO
    num_tried = 0
    for number in range(12):
        block = tier.pin(key_of(number))
        if block is not None:
            num_tried += 1
            assert await tier.fetch(block, np.empty(BLOCK_BYTES, dtype=np.uint8)) is None
    assert tier.health is NvmeHealth.OFF
    assert num_tried == 8
    assert not tier.has(key_of(11))
    slab.error_number = 0
    tier.keep_watch(time.monotonic() + 31, io_timeout_s=2)
    assert tier.has(key_of(11))
    tier.close()


async def test_bytes_that_changed_in_dram_are_not_written_back(slab: SickSlab) -> None:
    tier = await open_tier(slab)
    stamp, payload = make_block(1)
    payload[7] ^= 1
    assert await tier.store(stamp, payload) is StoreResult.BAD_SOURCE
    assert not tier.has(key_of(1))
    assert tier.stats().slots_by_state["free"] == tier.num_slots
    tier.close()


async def test_a_disk_that_hangs_is_a_miss_in_time_and_then_off(slab: SickSlab) -> None:
    tier = await open_tier(slab, num_blocks=3)
    memory = mmap.mmap(-1, 8 * BLOCK_BYTES)
    cache = NodeCache(memory, tier, CacheLimits(io_timeout_s=0.2))
    cache.accept_layout(BLOCK_BYTES, 0)
    keys = [key_of(number) for number in range(3)]
    slab.may_answer.clear()
    began_s = time.monotonic()
    acquired = await cache.promote_and_acquire(keys, HOLDER, 30, 0.3)
    assert time.monotonic() - began_s < 2
    assert acquired.blocks == []
    cache.expire(time.monotonic())
    assert tier.health is NvmeHealth.OFF
    assert cache.find(keys) == 0
    assert is_stuck(tier)
    slab.may_answer.set()
    await cache.promote_and_acquire(keys, HOLDER, 30, 10)  # joins the loads that were late
    assert not is_stuck(tier)
    tier.close()


async def put(cache: NodeCache, number: int) -> bool:
    """Store a block as a holder does; False where there is no room."""
    stamp, payload = make_block(number)
    await cache.write_back.wait_for_room(1, time.monotonic() + 1)
    (block,) = cache.reserve(ReserveWish([stamp.key], 30), HOLDER)
    if block is None:
        return False
    cache.arrivals.view(block)[:BLOCK_BYTES] = payload
    row = [block.slot, block.generation, stamp.num_tokens, stamp.num_bytes, stamp.checksum]
    return cache.commit([row], HOLDER) == 1


async def test_a_write_back_that_hangs_costs_its_own_slots_and_no_others(slab: SickSlab) -> None:
    """No store waits for it, and when it is given up all go on without a disk (Mooncake#2187)."""
    tier = await open_tier(slab)
    memory = mmap.mmap(-1, 20 * BLOCK_BYTES)
    cache = NodeCache(memory, tier, CacheLimits(io_timeout_s=0.3, room_wait_s=0.05))
    cache.accept_layout(BLOCK_BYTES, 0)
    pump = asyncio.ensure_future(cache.write_back.pump())
    slab.may_answer.clear()
    numbers = iter(range(10_000))
    began_s = time.monotonic()
    while tier.health is NvmeHealth.ON:
        asked_s = time.monotonic()
        await put(cache, next(numbers))
        assert time.monotonic() - asked_s < 5
        cache.expire(time.monotonic())
        assert time.monotonic() - began_s < 20
    assert is_stuck(tier)
    num_stuck = cache.stats(1).tiers["dram"].slots_by_state["evicting"]
    assert 0 < num_stuck < 10
    assert all([await put(cache, next(numbers)) for _ in range(100)])
    slab.may_answer.set()
    while cache.stats(1).tiers["dram"].slots_by_state["evicting"]:
        await asyncio.sleep(0)
        assert time.monotonic() - began_s < 40
    pump.cancel()
    tier.close()


async def test_two_holders_that_want_one_block_read_it_once(slab: SickSlab) -> None:
    tier = await open_tier(slab, num_blocks=2)
    memory = mmap.mmap(-1, 8 * BLOCK_BYTES)
    cache = NodeCache(memory, tier, CacheLimits())
    cache.accept_layout(BLOCK_BYTES, 0)
    keys = [key_of(0), key_of(1)]
    slab.may_answer.clear()
    asked = [
        asyncio.ensure_future(cache.promote_and_acquire(keys, holder, 30, 5)) for holder in (1, 2)
    ]
    await asyncio.sleep(0)
    assert cache.needs_promotion(keys)
    slab.may_answer.set()
    leases = await asyncio.gather(*asked)
    assert [len(lease.blocks) for lease in leases] == [2, 2]
    assert tier.stats().num_hits == 2
    assert cache.stats(2).num_leases == 2
    tier.close()
