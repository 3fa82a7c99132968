"""Room in DRAM: evict between the watermarks, writing back what only DRAM has."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from tiering.block import Block
from tiering.eviction.arc import ArcEvictor
from tiering.eviction.evictor import NewEvictor
from tiering.kvd.dram_tier import DramTier
from tiering.kvd.nvme_tier import NvmeTier, Source, StoreResult
from tiering.tier import SlotState

log = structlog.get_logger(__name__)

_MIN_BATCH = 16
_NUM_VICTIMS_LOOKED_AT = 256
_REASONS = {
    StoreResult.STORED: "written_back",
    StoreResult.NOT_ADMITTED: "not_admitted",
    StoreResult.REFUSED: "dropped",
    StoreResult.BAD_SOURCE: "dropped",
}


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Watermarks are shares of the DRAM slots in use.

    `io_timeout_s` is the longest one disk call may take, `room_wait_s` the longest a request waits
    for write-backs before it does without room. `new_evictor` and `tenant_share` are those of the
    DRAM slots.
    """

    high_watermark: float = 0.9
    low_watermark: float = 0.8
    io_timeout_s: float = 2.0
    room_wait_s: float = 0.1
    new_evictor: NewEvictor = ArcEvictor
    tenant_share: float | None = None


class WriteBack:
    """Evicts from DRAM on its own task (`pump`), so that requests mostly find room.

    A block that NVMe has too, or that has a lifetime, or that cannot be written back anywhere, is
    simply dropped.
    """

    def __init__(self, dram: DramTier, nvme: NvmeTier, limits: CacheLimits) -> None:
        self._dram = dram
        self._nvme = nvme
        self._limits = limits
        self._num_wanted_free = 0
        self._pump_wanted = asyncio.Event()
        self._room_made = asyncio.Event()
        self._writes: set[asyncio.Task[int]] = set()
        self._discards: set[asyncio.Task[bool]] = set()

    def watch_level(self) -> None:
        """Wake the pump when the high watermark is passed."""
        directory = self._dram.directory
        if directory.num_used > self._limits.high_watermark * directory.num_slots:
            self._pump_wanted.set()

    def make_room(self, num_blocks: int) -> bool:
        """Drop blocks that need no write-back until so many slots are free."""
        directory = self._dram.directory
        if directory.num_free < num_blocks:
            # While somebody is above its share, nobody else's block is dropped out of turn.
            greedy = directory.next_greedy_victims(_NUM_VICTIMS_LOOKED_AT)
            for victim in greedy or directory.next_victims(_NUM_VICTIMS_LOOKED_AT):
                if self._drop_if_free(victim) and directory.num_free >= num_blocks:
                    break
        return directory.num_free >= num_blocks

    async def wait_for_room(self, num_blocks: int, deadline_s: float) -> None:
        """Let the pump write blocks back until so many slots are free, or time is up."""
        num_blocks = min(num_blocks, self._dram.directory.num_slots)
        deadline_s = min(deadline_s, time.monotonic() + self._limits.room_wait_s)
        while not self.make_room(num_blocks):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return
            self._num_wanted_free = max(self._num_wanted_free, num_blocks)
            self._room_made.clear()
            self._pump_wanted.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._room_made.wait(), left_s)

    async def pump(self) -> None:
        """Evict in batches, from the high watermark down to the low one; runs until cancelled."""
        while True:
            await self._pump_wanted.wait()
            self._pump_wanted.clear()
            directory = self._dram.directory
            num_goal = directory.num_slots - int(self._limits.low_watermark * directory.num_slots)
            num_goal = min(max(num_goal, self._num_wanted_free), directory.num_slots)
            self._num_wanted_free = 0
            while directory.num_free < num_goal:
                if not await self._evict_batch(num_goal - directory.num_free):
                    break

    async def flush(self, deadline_s: float) -> int:
        """Write what only DRAM has to NVMe, youngest first; returns the number of blocks."""
        if self._writes:
            await asyncio.wait(self._writes, timeout=max(deadline_s - time.monotonic(), 0))
        blocks = [b for b in self._dram.directory.readable_by_age() if self._is_dirty(b)]
        youngest = blocks[::-1][: self._nvme.num_slots]
        num_stored = 0
        for start in range(0, len(youngest), self._batch_blocks):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._nvme.is_writable:
                break
            batch = youngest[start : start + self._batch_blocks]
            write = asyncio.ensure_future(self._store(batch, is_filtered=False))
            done, _ = await asyncio.wait([write], timeout=left_s)
            if done:
                num_stored += write.result().count(StoreResult.STORED)
        log.info("dram_flushed", num_blocks=num_stored, num_left=len(blocks) - num_stored)
        return num_stored

    def discard_from_nvme(self, key: bytes) -> bool:
        """Start dropping a block from NVMe, header and all; False when it is not there."""
        if not self._nvme.has(key):
            return False
        task = asyncio.ensure_future(self._nvme.discard(key))
        self._discards.add(task)
        task.add_done_callback(self._discards.discard)
        return True

    @property
    def _batch_blocks(self) -> int:
        """Blocks evicted at once: enough for whole units on the disk and all of its threads."""
        return max(_MIN_BATCH, 2 * self._nvme.unit_slots)

    async def _evict_batch(self, num_blocks: int) -> int:
        directory = self._dram.directory
        num_freed = 0
        dirty: list[Block] = []
        for victim in directory.next_victims(min(num_blocks, self._batch_blocks)):
            if self._drop_if_free(victim):
                num_freed += 1
            else:
                directory.begin_eviction(victim)
                dirty.append(victim)
        pending = {self._start_write_back(dirty)} if dirty else set()
        while pending and self._nvme.is_writable:
            done, pending = await asyncio.wait(pending, timeout=self._limits.io_timeout_s)
            num_freed += sum(write.result() for write in done)
        if num_freed:
            self._room_made.set()
        return num_freed

    def _start_write_back(self, blocks: Sequence[Block]) -> asyncio.Task[int]:
        write = asyncio.ensure_future(self._write_back(blocks))
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        return write

    async def _write_back(self, blocks: Sequence[Block]) -> int:
        num_gone = 0
        results = await self._store(blocks, is_filtered=True)
        for block, result in zip(blocks, results, strict=True):
            if not block.is_listed:
                self.discard_from_nvme(block.key)  # discarded while it was being written
            if self._dram.directory.end_eviction(block):
                num_gone += 1
                self._dram.counters.evictions[_REASONS[result]] += 1
        return num_gone

    async def _store(self, blocks: Sequence[Block], *, is_filtered: bool) -> list[StoreResult]:
        sources = [
            Source(b.stamp, self._dram.slab.view(b.slot), b.num_uses if is_filtered else None)
            for b in blocks
            if b.stamp is not None
        ]
        results = await self._nvme.store_all(sources)
        for block, result in zip(blocks, results, strict=True):
            if result is StoreResult.BAD_SOURCE:
                self._dram.suspect(block.key, block.generation)
        return results

    def _drop_if_free(self, block: Block) -> bool:
        """Drop a block if that loses nothing, or if there is nowhere to write it."""
        if self._is_dirty(block) and self._nvme.is_writable:
            return False
        self._dram.directory.drop(block, is_evicted=True)
        is_clean = self._nvme.has(block.key)
        self._nvme.prolong(block.key)
        self._dram.counters.evictions["clean" if is_clean else "dropped"] += 1
        return True

    def _is_dirty(self, block: Block) -> bool:
        return block.lifetime_s is None and not self._nvme.has(block.key)


def count_own_pins(block: Block) -> int:
    """Pins that write-back itself holds on a block."""
    return int(block.state is SlotState.EVICTING)
