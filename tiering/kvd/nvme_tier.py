"""The NVMe tier of kvd: index, slab file and I/O threads. Nothing here fails a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, StrEnum, auto
from functools import partial
from itertools import count
from typing import TypeVar

import structlog

from tiering.block_directory import Block, BlockDirectory
from tiering.block_stamp import BlockStamp
from tiering.errors import SlotCorrupt
from tiering.eviction.lru import LruEvictor
from tiering.kvd.stats import TierCounters, TierStats, snapshot
from tiering.stores.block_store import ByteArray, payload_checksum
from tiering.stores.nvme_slab import NvmeSlab
from tiering.tier import SlotState

log = structlog.get_logger(__name__)
T = TypeVar("T")

NUM_IO_THREADS = 4
_KVD = 0  # holder id of kvd's own slots
_MAX_ERRORS_IN_A_ROW = 8


class NvmeHealth(StrEnum):
    """A refused write makes the tier READ_ONLY, reads that keep failing turn it OFF; both stay."""

    ON = "on"
    READ_ONLY = "read_only"
    OFF = "off"


class StoreResult(Enum):
    """What became of a block that was to be written back."""

    STORED = auto()
    REFUSED = auto()  # no room or no healthy disk
    BAD_SOURCE = auto()  # the DRAM bytes were not those of the stamp


class NvmeTier:
    """Blocks in a slab file. Runs on kvd's event loop; only slab calls run on the I/O threads.

    `slab` None is a tier that is off from the start.
    """

    def __init__(self, slab: NvmeSlab | None) -> None:
        self._slab = slab
        self._threads = ThreadPoolExecutor(NUM_IO_THREADS, thread_name_prefix="nvme-io")
        self._directory = BlockDirectory(0, LruEvictor)
        self._num_errors_in_a_row = 0
        self._call_ids = count()
        self._running: dict[int, float] = {}  # call -> when it began on its thread
        self.counters = TierCounters()
        self.health = NvmeHealth.OFF if slab is None else NvmeHealth.ON

    # questions

    @property
    def block_bytes(self) -> int:
        """Block size that the file is laid out for; 0 when it is not."""
        return self._slab.block_bytes if self._slab else 0

    @property
    def is_writable(self) -> bool:
        """Blocks may be written back."""
        return self.health is NvmeHealth.ON and self._directory.num_slots > 0

    @property
    def num_slots(self) -> int:
        """Slots of the file."""
        return self._directory.num_slots

    @property
    def num_used(self) -> int:
        """Slots in use."""
        return self._directory.num_used

    @property
    def has_stuck_io(self) -> bool:
        """A slab call has not come back."""
        return bool(self._running)

    def has(self, key: bytes) -> bool:
        """The block can be read from here."""
        is_on = self.health is not NvmeHealth.OFF
        return is_on and self._directory.find_readable(key) is not None

    def stats(self) -> TierStats:
        """The tier as it stands."""
        slot_bytes = self._slab.slot_bytes if self._slab else 0
        return snapshot(self._directory, slot_bytes, self.counters, self.health.value)

    # layout

    async def recover(self) -> None:
        """Rebuild the index from the slots' headers."""
        if self._slab is None:
            return
        try:
            found = await self._run(self._scan)
        except OSError as error:
            self._turn(NvmeHealth.OFF, "scan", error)
            return
        newest: dict[bytes, tuple[int, BlockStamp]] = {}
        for slot, stamp in found.items():
            known = newest.get(stamp.key)
            if known is None or known[1].generation < stamp.generation:
                newest[stamp.key] = (slot, stamp)
        first_generation = 1 + max((stamp.generation for stamp in found.values()), default=0)
        self._directory = BlockDirectory(self._slab.num_slots, LruEvictor, first_generation)
        self._directory.adopt(dict(newest.values()))
        log.info(
            "nvme_recovered",
            num_blocks=len(newest),
            num_slots=self._slab.num_slots,
            block_bytes=self._slab.block_bytes,
            is_direct=self._slab.is_direct,
        )

    def lay_out(self, block_bytes: int) -> None:
        """Cut the file anew; its blocks are gone. No I/O may be under way."""
        if self._slab is None or self.health is not NvmeHealth.ON:
            return
        try:
            self._slab.lay_out(block_bytes)
        except OSError as error:
            self._turn(NvmeHealth.OFF, "lay_out", error)
            return
        self._directory = BlockDirectory(self._slab.num_slots, LruEvictor)
        log.info("nvme_laid_out", block_bytes=block_bytes, num_slots=self._slab.num_slots)

    # moves

    async def store(self, source: BlockStamp, payload: ByteArray) -> StoreResult:
        """Write a block back, after checking that its bytes are still those of the stamp."""
        if self._slab is None or not self.is_writable:
            return StoreResult.REFUSED
        if self.has(source.key):
            return StoreResult.STORED
        block = self._reserve(source.key)
        if block is None:
            self.counters.num_stores_dropped += 1
            return StoreResult.REFUSED
        stamp = BlockStamp(
            source.key, block.generation, source.num_tokens, source.num_bytes, source.checksum
        )
        try:
            await self._run(partial(_checked_write, self._slab, block.slot, stamp, payload))
        except OSError as error:
            self._directory.abort(block)
            self.counters.num_stores_dropped += 1
            self._turn(NvmeHealth.READ_ONLY, "write", error)
            return StoreResult.REFUSED
        except SlotCorrupt:
            self._directory.abort(block)
            return StoreResult.BAD_SOURCE
        self._directory.publish(block, stamp, time.monotonic())
        return StoreResult.STORED

    def pin(self, key: bytes) -> Block | None:
        """Hold a block for one `fetch`, which ends the pin."""
        block = self._directory.find_readable(key) if self.has(key) else None
        if block is not None:
            self._directory.pin(block)
        return block

    def unpin(self, block: Block) -> None:
        """Let a pinned block go unread."""
        self._directory.unpin(block)

    async def fetch(self, block: Block, into: ByteArray) -> BlockStamp | None:
        """Read and verify a pinned block; None is a miss, and a bad slot is quarantined."""
        stamp = block.stamp
        if self._slab is None or stamp is None:
            self._directory.unpin(block)
            return None
        try:
            await self._run(partial(self._slab.read, block.slot, stamp, into))
        except SlotCorrupt as error:
            self._on_corrupt(error)
            await self._quarantine(block)
            return None
        except OSError as error:
            await self._quarantine(block)
            self._on_read_error(error)
            return None
        self._num_errors_in_a_row = 0
        self._directory.unpin(block)
        self.counters.num_hits += 1
        return stamp

    async def discard(self, key: bytes) -> bool:
        """Drop a block so that no restart brings it back; False when it is not here or in use."""
        block = self._directory.find_readable(key)
        if self._slab is None or block is None or block.num_leases:
            return False
        self._directory.pin(block)
        self._directory.drop(block)
        await self._invalidate(block.slot)
        self._directory.unpin(block)
        self.counters.evictions["discarded"] += 1
        return True

    def check_deadlines(self, now_s: float, io_timeout_s: float) -> None:
        """Turn the tier off if a slab call has hung: a sick disk must not hold DRAM up."""
        oldest_s = min(list(self._running.values()), default=now_s)
        if now_s - oldest_s > io_timeout_s:
            self._turn(NvmeHealth.OFF, "wait", TimeoutError("a disk call hangs"))

    async def sync(self) -> None:
        """Wait until what was stored is on the medium."""
        if self._slab is not None and self.health is NvmeHealth.ON:
            try:
                await self._run(self._slab.sync)
            except OSError as error:
                self._turn(NvmeHealth.READ_ONLY, "sync", error)

    def close(self) -> None:
        """Close the file, unless a call that hangs still uses it."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._slab is not None and not self.has_stuck_io:
            self._slab.close()

    def _reserve(self, key: bytes) -> Block | None:
        if self._directory.num_free == 0:
            for victim in self._directory.next_victims(1):
                self._directory.drop(victim)
                self.counters.evictions["capacity"] += 1
        return self._directory.reserve(key, _KVD, state=SlotState.WRITING)

    async def _quarantine(self, block: Block) -> None:
        self._directory.quarantine(block)
        await self._invalidate(block.slot)

    async def _invalidate(self, slot: int) -> None:
        if self._slab is None or self.health is not NvmeHealth.ON:
            return
        try:
            await self._run(partial(self._slab.invalidate, slot))
        except OSError as error:
            self._turn(NvmeHealth.READ_ONLY, "invalidate", error)

    def _scan(self) -> dict[int, BlockStamp]:
        slab = self._slab
        if slab is None:
            return {}
        found: dict[int, BlockStamp] = {}
        for slot in range(slab.num_slots):
            try:
                stamp = slab.inspect(slot)
            except SlotCorrupt as error:
                self._on_corrupt(error)
                continue
            if stamp is not None:
                found[slot] = stamp
        return found

    async def _run(self, call: Callable[[], T]) -> T:
        call_id = next(self._call_ids)

        def timed() -> T:
            self._running[call_id] = time.monotonic()
            try:
                return call()
            finally:
                del self._running[call_id]

        return await asyncio.get_running_loop().run_in_executor(self._threads, timed)

    def _on_corrupt(self, error: SlotCorrupt) -> None:
        self.counters.num_checksum_failures += 1
        num_failures = self.counters.num_checksum_failures
        if num_failures.bit_count() == 1:  # the 1st, 2nd, 4th, ...: a rotten disk must not flood
            log.warning(
                "nvme_slot_corrupt", slot=error.slot, reason=error.reason, num_failures=num_failures
            )

    def _on_read_error(self, error: OSError) -> None:
        self.counters.num_io_errors += 1
        self._num_errors_in_a_row += 1
        if self._num_errors_in_a_row >= _MAX_ERRORS_IN_A_ROW:
            self._turn(NvmeHealth.OFF, "read", error)

    def _turn(self, health: NvmeHealth, doing: str, error: OSError) -> None:
        self.counters.num_io_errors += 1
        if self.health in (health, NvmeHealth.OFF):
            return  # said once
        self.health = health
        log.warning("nvme_degraded", health=health.value, doing=doing, error=str(error))


def _checked_write(slab: NvmeSlab, slot: int, stamp: BlockStamp, payload: ByteArray) -> None:
    if payload_checksum(payload[: stamp.num_bytes]) != stamp.checksum:
        raise SlotCorrupt(slot, "DRAM bytes changed before they were written back")
    slab.write(slot, stamp, payload)
