"""The NVMe tier of kvd: index, slab file and I/O threads. Nothing here fails a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import structlog

from tiering.block import Block
from tiering.block_codec import codec_of
from tiering.block_layout import BlockLayout
from tiering.block_stamp import BlockStamp
from tiering.errors import SlotCorrupt
from tiering.kvd.admission import WriteBudget, WritePressure
from tiering.kvd.disk_health import DiskHealth, NvmeHealth
from tiering.kvd.io_threads import IoThreads
from tiering.kvd.nvme_index import NvmeIndex
from tiering.kvd.nvme_limits import NvmeLimits
from tiering.kvd.slab_run import SlabRuns, Source, StoreResult, newest_copies, runs_of
from tiering.kvd.stats import TierCounters, TierStats, snapshot
from tiering.stores.block_store import ByteArray
from tiering.stores.nvme_slab import NvmeSlab

__all__ = ["NvmeHealth", "NvmeLimits", "NvmeTier", "Source", "StoreResult"]

log = structlog.get_logger(__name__)

NUM_IO_THREADS = 4


class NvmeTier:
    """Blocks in a slab file. Runs on kvd's event loop; only slab calls run on the I/O threads.

    `slab` None is a tier that is off from the start.
    """

    def __init__(self, slab: NvmeSlab | None, limits: NvmeLimits | None = None) -> None:
        self._slab = slab
        self._limits = limits or NvmeLimits()
        self._threads = IoThreads(NUM_IO_THREADS)
        self._runs = SlabRuns()
        self._uncut_bytes = 0  # of the blocks for which the file has yet to be cut
        self._health = DiskHealth(self._limits.disk)
        if slab is None:
            self._health.give_up()
        self._budget = WriteBudget(self._limits.write_bytes_per_day, time.monotonic())
        self._index = NvmeIndex(0, self.unit_slots, self._limits)
        self.counters = TierCounters()

    # questions

    @property
    def health(self) -> NvmeHealth:
        """What the disk is still trusted with."""
        return self._health.level

    @property
    def form(self) -> str:
        """How the blocks are packed, as in `SlabLayout`."""
        return self._runs.form

    @property
    def unit_slots(self) -> int:
        """Blocks that one disk call moves together at most."""
        return self._slab.unit_slots if self._slab else 1

    @property
    def is_writable(self) -> bool:
        """Blocks may be written back."""
        return self.health is NvmeHealth.ON and self._index.directory.num_slots > 0

    @property
    def num_slots(self) -> int:
        """Slots of the file."""
        return self._index.directory.num_slots

    @property
    def num_used(self) -> int:
        """Slots in use."""
        return self._index.directory.num_used

    @property
    def has_stuck_io(self) -> bool:
        """A slab call has not come back."""
        return self._threads.is_busy

    def has(self, key: bytes) -> bool:
        """The block can be read from here."""
        is_on = self.health is not NvmeHealth.OFF
        return is_on and self._index.directory.find_readable(key) is not None

    def keys_of(self, owner: bytes) -> list[bytes]:
        """Keys of one owner's blocks."""
        return self._index.directory.keys_of(owner)

    def listed(self, start: int, stop: int) -> list[Block]:
        """Listed blocks by position."""
        return self._index.directory.listed(start, stop)

    def stats(self) -> TierStats:
        """The tier as it stands."""
        slot_bytes = self._slab.slot_bytes if self._slab else 0
        num_errors = self._health.num_errors
        stats = snapshot(
            self._index.directory, slot_bytes, self.counters, self.health.value, num_errors
        )
        return replace(stats, is_admission_filtered=self._index.filter.is_on, form=self.form)

    # layout

    async def attach(self, slab: NvmeSlab) -> bool:
        """Begin with a file that could not be used before; False when it still cannot."""
        self._slab, health = slab, self._health
        self._health = DiskHealth(self._limits.disk)
        self._health.give_up()  # until its blocks are known
        if not await self.recover():
            self._slab, self._health = None, health
            slab.close()
            return False
        self._health = DiskHealth(self._limits.disk)
        return True

    async def recover(self) -> bool:
        """Rebuild the index from the slots' headers; False when they cannot be read."""
        if self._slab is None:
            return False
        try:
            found = await self._scan(self._slab)
        except OSError as error:
            self._health.turn_off("scan", error, time.monotonic())
            return False
        self._uncut_bytes = 0
        newest = newest_copies(found)
        first_generation = 1 + max((stamp.generation for stamp in found.values()), default=0)
        slab = self._slab
        self._index = NvmeIndex(slab.num_slots, slab.unit_slots, self._limits, first_generation)
        self._index.adopt(newest)
        log.info(
            "nvme_recovered",
            num_blocks=len(newest),
            num_slots=slab.num_slots,
            block_bytes=slab.block_bytes,
            unit_slots=slab.unit_slots,
            is_direct=slab.is_direct,
        )
        return True

    def fit(self, block_bytes: int, layout: BlockLayout | None) -> None:
        """Serve blocks of this size and layout (None: unknown), with a file of others cut anew."""
        self._runs = SlabRuns(codec_of(layout, self._limits.compression))
        cut = self._slab.layout if self._slab else None
        wanted = (self._runs.stored_bytes(block_bytes), self._runs.form)
        if self._uncut_bytes or cut is None or (cut.block_bytes, cut.form) != wanted:
            self.lay_out(block_bytes)

    def lay_out(self, block_bytes: int) -> None:
        """Cut the file anew; its blocks are gone. No I/O may be under way.

        While the disk refuses that nothing is served, and `keep_watch` tries it again.
        """
        self._index = NvmeIndex(0, self.unit_slots, self._limits)
        self._uncut_bytes = block_bytes
        if self._slab is None or self.health is not NvmeHealth.ON:
            return
        try:
            self._slab.lay_out(self._runs.stored_bytes(block_bytes), self._runs.form)
        except OSError as error:
            self._health.turn_off("lay_out", error, time.monotonic())
            return
        slab, self._uncut_bytes = self._slab, 0
        self._index = NvmeIndex(slab.num_slots, slab.unit_slots, self._limits)
        log.info(
            "nvme_laid_out",
            num_slots=slab.num_slots,
            unit_slots=slab.unit_slots,
            form=self.form,
        )

    # moves

    async def store(self, source: BlockStamp, payload: ByteArray) -> StoreResult:
        """Write one block back; see `store_all`."""
        (result,) = await self.store_all([Source(source, payload)])
        return result

    async def store_all(self, sources: Sequence[Source]) -> list[StoreResult]:
        """Write blocks back, neighbours in one call, those that changed in DRAM not at all."""
        slab, now_s = self._slab, time.monotonic()
        if slab is None or not self.is_writable:
            return [StoreResult.REFUSED] * len(sources)
        results: dict[bytes, StoreResult] = {}
        wanted: list[Source] = []
        for source in sources:
            key = source.stamp.key
            results[key] = self._judged(source, slab.slot_bytes * (len(wanted) + 1), now_s)
            if results[key] is StoreResult.STORED and not self.has(key):
                wanted.append(source)
        placed = self._placed(wanted)
        for source in wanted[len(placed) :]:
            self.counters.num_stores_dropped += 1
            results[source.stamp.key] = StoreResult.REFUSED
        runs = runs_of([block.slot for block, _ in placed], slab.unit_slots)
        writes = [self._write_run(slab, placed[run.start : run.stop]) for run in runs]
        for outcome in await asyncio.gather(*writes):
            results |= outcome
        return [results[source.stamp.key] for source in sources]

    def pin(self, key: bytes) -> Block | None:
        """Hold a block for one `fetch_all`, which ends the pin."""
        block = self._index.directory.find_readable(key) if self.has(key) else None
        if block is not None:
            self._index.directory.pin(block)
        return block

    def unpin(self, block: Block) -> None:
        """Let a pinned block go unread."""
        self._index.directory.unpin(block)
        self._index.units.use(block.slot)

    def prolong(self, key: bytes) -> None:
        """A block of which DRAM just let its copy go counts as used now."""
        block = self._index.directory.find_readable(key)
        if block is not None:
            self._index.units.use(block.slot)

    def runs_of(self, blocks: Sequence[Block]) -> list[range]:
        """Positions of blocks, in order, that one `fetch_all` call on the disk can read together."""
        return runs_of([block.slot for block in blocks], self.unit_slots)

    async def fetch(self, block: Block, into: ByteArray) -> BlockStamp | None:
        """Read and verify one pinned block; see `fetch_all`."""
        (stamp,) = await self.fetch_all([block], [into])
        return stamp

    async def fetch_all(
        self, blocks: Sequence[Block], into: Sequence[ByteArray]
    ) -> list[BlockStamp | None]:
        """Read and verify one run of pinned blocks; None is a miss, and a bad slot is quarantined."""
        stamps = [block.stamp for block in blocks if block.stamp is not None]
        slab = self._slab
        if slab is None or len(stamps) < len(blocks):
            for block in blocks:
                self._index.directory.unpin(block)
            return [None] * len(blocks)
        read = partial(self._runs.read, slab, blocks[0].slot, stamps, into)
        try:
            outcomes, took_s = await self._threads.run(read)
        except OSError as error:
            for block in blocks:
                await self._quarantine(block)
            self._health.count_read_error(error, time.monotonic())
            return [None] * len(blocks)
        self.counters.loads.add(sum(stamp.num_bytes for stamp in stamps), took_s)
        self._health.note_read(took_s, time.monotonic())
        for block, outcome in zip(blocks, outcomes, strict=True):
            if isinstance(outcome, SlotCorrupt):
                self._on_corrupt(outcome)
                await self._quarantine(block)
            else:
                self.unpin(block)
                self.counters.num_hits += 1
                self._index.filter.count_hit()
        return [None if isinstance(outcome, SlotCorrupt) else outcome for outcome in outcomes]

    async def discard(self, key: bytes) -> bool:
        """Drop a block so that no restart brings it back; False when it is not here or in use."""
        block = self._index.directory.find_readable(key)
        if self._slab is None or block is None or block.num_leases:
            return False
        self._index.directory.pin(block)
        self._index.directory.drop(block)
        await self._invalidate(block.slot)
        self._index.directory.unpin(block)
        self.counters.evictions["discarded"] += 1
        return True

    def keep_watch(self, now_s: float, io_timeout_s: float) -> None:
        """Turn the tier off while a slab call hangs, try a disk again, drop what is idle too long."""
        if self._threads.oldest_call_s(now_s) > io_timeout_s:
            self._health.turn_off("wait", TimeoutError("a disk call hangs"), now_s)
        else:
            self._health.retry(now_s)
        is_on = self.health is NvmeHealth.ON
        if self._uncut_bytes and is_on and not self.has_stuck_io:
            self.lay_out(self._uncut_bytes)
        self.counters.evictions["expired"] += self._index.directory.expire(now_s).num_blocks

    async def sync(self) -> None:
        """Wait until what was stored is on the medium."""
        if self._slab is not None and self.health is NvmeHealth.ON:
            try:
                await self._threads.run(self._slab.sync)
            except OSError as error:
                self._health.refuse_writes("sync", error, time.monotonic())

    def close(self) -> None:
        """Close the file, unless a call that hangs still uses it."""
        self._threads.shut_down()
        if self._slab is not None and not self.has_stuck_io:
            self._slab.close()

    # storing

    def _judged(self, source: Source, num_bytes: int, now_s: float) -> StoreResult:
        """STORED if the block is here or should be."""
        if self.has(source.stamp.key):
            return StoreResult.STORED
        if not self._budget.has(num_bytes, now_s):
            self.counters.num_stores_dropped += 1
            return StoreResult.REFUSED
        pressure = WritePressure(self._index.occupancy, self._budget.is_short(now_s))
        if source.num_uses is None or self._index.filter.admits(
            source.stamp.key, source.num_uses, pressure
        ):
            return StoreResult.STORED
        self.counters.num_not_admitted += 1
        return StoreResult.NOT_ADMITTED

    def _placed(self, sources: Sequence[Source]) -> list[tuple[Block, Source]]:
        """A slot for each source, as far as there is room, in the order of the slots."""
        self.counters.evictions["capacity"] += self._index.make_room(len(sources))
        blocks = self._index.place(source.stamp for source in sources)
        return sorted(zip(blocks, sources, strict=False), key=lambda pair: pair[0].slot)

    async def _write_run(
        self, slab: NvmeSlab, placed: Sequence[tuple[Block, Source]]
    ) -> dict[bytes, StoreResult]:
        """Write blocks into the neighbouring slots that they were given."""
        results: dict[bytes, StoreResult] = {}
        stamps = [replace(s.stamp, generation=block.generation) for block, s in placed]
        payloads = [source.payload for _, source in placed]
        write = partial(self._runs.write, slab, placed[0][0].slot, stamps, payloads)
        try:
            outcomes, took_s = await self._threads.run(write)
        except OSError as error:
            self.counters.num_stores_dropped += len(placed)
            self._health.refuse_writes("write", error, time.monotonic())
            for block, _ in placed:
                self._index.directory.abort(block)
                results[block.key] = StoreResult.REFUSED
            return results
        num_bytes = 0
        for (block, _), outcome in zip(placed, outcomes, strict=True):
            if isinstance(outcome, BlockStamp):
                self._index.directory.publish(block, outcome, time.monotonic())
                self._index.units.use(block.slot)
                self._index.filter.count_write()
                self._budget.spend(slab.slot_bytes)
                num_bytes += outcome.num_bytes
                results[block.key] = StoreResult.STORED
            else:
                self._index.directory.abort(block)
                results[block.key] = outcome
        self.counters.stores.add(num_bytes, took_s)
        self._health.note_write(took_s, time.monotonic())
        return results

    async def _quarantine(self, block: Block) -> None:
        self._index.directory.quarantine(block)
        await self._invalidate(block.slot)

    async def _invalidate(self, slot: int) -> None:
        if self._slab is None or self.health is not NvmeHealth.ON:
            return
        try:
            await self._threads.run(partial(self._slab.invalidate, slot))
        except OSError as error:
            self._health.refuse_writes("invalidate", error, time.monotonic())

    # recovery

    async def _scan(self, slab: NvmeSlab) -> dict[int, BlockStamp]:
        found: dict[int, BlockStamp] = {}
        shares = [range(i, slab.num_units, NUM_IO_THREADS) for i in range(NUM_IO_THREADS)]
        scans = (self._threads.run(partial(slab.scan, share)) for share in shares)
        for stamps, damaged in await asyncio.gather(*scans):
            found |= stamps
            for fault in damaged:
                self._on_corrupt(fault)
        return found

    def _on_corrupt(self, fault: SlotCorrupt) -> None:
        self.counters.num_checksum_failures += 1
        num_failures = self.counters.num_checksum_failures
        if num_failures.bit_count() == 1:  # the 1st, 2nd, 4th, ...: a rotten disk must not flood
            log.warning(
                "nvme_slot_corrupt", slot=fault.slot, reason=fault.reason, num_failures=num_failures
            )
