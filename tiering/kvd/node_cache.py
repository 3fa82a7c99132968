"""Both tiers of one node behind the operations that holders ask for. Runs on kvd's event loop."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from tiering.block import Block
from tiering.block_layout import BlockLayout
from tiering.block_stamp import BlockStamp
from tiering.errors import LayoutMismatch, LayoutNotPacked
from tiering.kvd.arrivals import Arrivals
from tiering.kvd.dram_tier import DramTier
from tiering.kvd.nvme_tier import NvmeTier
from tiering.kvd.promotion import Promotion
from tiering.kvd.stats import KvdStats
from tiering.kvd.write_back import CacheLimits, WriteBack, count_own_pins
from tiering.stores.nvme_slab import NvmeSlab
from tiering.tier import SlotState, Tier

log = structlog.get_logger(__name__)

LIST_STEP = 1024  # blocks looked at for one question: the loop must not be held up


@dataclass(frozen=True, slots=True)
class Acquired:
    """A lease and what it holds, in order; `tiers` says where each block was found."""

    lease_id: int
    blocks: list[Block]
    tiers: list[Tier]


@dataclass(frozen=True, slots=True)
class ReserveWish:
    """Blocks that a holder wants to write; `owner` as in `BlockStamp`."""

    keys: list[bytes]
    ttl_s: float
    lifetime_s: float | None = None
    owner: bytes = b""


class NodeCache:
    """The DRAM slab's index over an NVMe tier.

    A block is inclusive on the way up (a promoted block stays in NVMe, so its eviction from DRAM
    costs nothing) and written back on the way down. `memory` is the mapped memfd.
    """

    def __init__(self, memory: mmap.mmap, nvme: NvmeTier, limits: CacheLimits) -> None:
        self._dram = DramTier(memory, limits.new_evictor, limits.tenant_share)
        self._nvme = nvme
        self._limits = limits
        self._layout: BlockLayout | None = None
        self._promotion = Promotion(self._dram, nvme)
        self._num_commits_refused = 0
        self._num_purges = 0
        self.write_back = WriteBack(self._dram, nvme, limits)
        self.arrivals = Arrivals(self._dram, self.write_back)

    # layout

    @property
    def block_bytes(self) -> int:
        """Largest block that fits a slot, as the first holder asked for it; 0 before it."""
        return self._dram.block_bytes

    @property
    def slot_bytes(self) -> int:
        """Stride of the DRAM slots."""
        return self._dram.slab.slot_bytes

    def accept_layout(
        self, block_bytes: int, num_other_holders: int, layout: BlockLayout | None = None
    ) -> None:
        """Lay the slabs out for the first holder; later ones must not ask for more.

        Smaller blocks, of another model on this node, lie in slots of the same size, unless blocks are
        packed. An NVMe file of another layout is cut anew for the first holder of this process.
        `layout` is None where the holder does not say it; its blocks are not packed then.

        Raises:
            LayoutMismatch: the slabs are in use with smaller blocks, or with packed ones of another size.
            LayoutNotPacked: the block size is the same, but this kvd packs the blocks of another layout.
            ValueError: a block has no byte.
        """
        if (block_bytes, layout) == (self.block_bytes, self._layout):
            return
        num_used = self._dram.directory.num_used + self._nvme.num_used
        if self.block_bytes and (num_other_holders or num_used):
            is_packed = bool(self._nvme.form)
            if block_bytes > self.block_bytes or (is_packed and block_bytes != self.block_bytes):
                raise LayoutMismatch(block_bytes, self.block_bytes)
            if is_packed:
                raise LayoutNotPacked(str(layout), str(self._layout))
            return
        self._dram.lay_out(block_bytes)
        self._layout = layout if layout and layout.block_bytes == block_bytes else None
        self._nvme.fit(block_bytes, self._layout)

    def namespace_of(self, namespace: str) -> str:
        """What peers must have in common with a holder's blocks, once these have been on the disk."""
        return f"{namespace}+{self._nvme.form}" if self._nvme.form else namespace

    async def attach_nvme(self, slab: NvmeSlab) -> bool:
        """Take a slab file into use; False when its blocks cannot be read."""
        if not await self._nvme.attach(slab):
            return False
        if self.block_bytes:
            self._nvme.fit(self.block_bytes, self._layout)
        return True

    # reading

    def find(self, keys: Sequence[bytes]) -> int:
        """Length of the head run that DRAM or NVMe can give."""
        for index, key in enumerate(keys):
            if self._dram.directory.find_readable(key) is None and not self._nvme.has(key):
                return index
        return len(keys)

    def locate(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Lengths of the head run that DRAM can give at once, and of that with NVMe."""
        readable = self._dram.directory.find_readable
        num_dram = next((n for n, key in enumerate(keys) if readable(key) is None), len(keys))
        return num_dram, num_dram + self.find(keys[num_dram:])

    def needs_promotion(self, keys: Sequence[bytes]) -> bool:
        """The head run goes on behind what can be leased from DRAM at once."""
        return self._promotion.is_wanted(keys)

    def acquire(
        self, keys: Sequence[bytes], holder_id: int, ttl_s: float, promoted: frozenset[bytes]
    ) -> Acquired:
        """Lease the head run that is in DRAM now; `promoted` came from NVMe for this call."""
        directory = self._dram.directory
        blocks: list[Block] = []
        for key in keys:
            block = directory.find_readable(key)
            if block is None:
                self._count_miss(key)
                break
            blocks.append(block)
        if not blocks:
            return Acquired(0, [], [])
        lease_id = directory.open_lease(holder_id, time.monotonic() + ttl_s)
        for block in blocks:
            directory.lease(lease_id, block)
        tiers = [Tier.NVME if block.key in promoted else Tier.DRAM for block in blocks]
        self._dram.counters.num_hits += tiers.count(Tier.DRAM)
        return Acquired(lease_id, blocks, tiers)

    async def promote_and_acquire(
        self, keys: Sequence[bytes], holder_id: int, ttl_s: float, wait_s: float
    ) -> Acquired:
        """Bring the head run up from NVMe, then lease it; what is late or bad ends the run."""
        deadline_s = time.monotonic() + wait_s
        directory = self._dram.directory
        run, num_missing = self._promotion.plan_run(keys)
        held = [b for b in map(directory.find_readable, run) if b is not None]
        for block in held:
            directory.pin(block)
        try:
            await self.write_back.wait_for_room(num_missing, deadline_s)
            loads = self._promotion.start(run)
            self.write_back.watch_level()
            if loads:
                left_s = max(deadline_s - time.monotonic(), 0)
                await asyncio.wait(set(loads.values()), timeout=left_s)
            if len(run) < len(keys):
                self._count_miss(keys[len(run)])
            return self.acquire(run, holder_id, ttl_s, frozenset(loads))
        finally:
            for block in held:
                directory.unpin(block)

    def release(self, lease_id: int, holder_id: int) -> None:
        """End a lease; nothing if it is gone."""
        self._dram.directory.release(lease_id, holder_id)

    # writing

    def count_missing(self, keys: Sequence[bytes]) -> int:
        """Blocks that a reservation would need slots for."""
        return sum(self._is_missing(key) for key in keys)

    def reserve(self, wish: ReserveWish, holder_id: int) -> list[Block | None]:
        """A slot for every key that no tier has, while there is room."""
        deadline_s = time.monotonic() + wish.ttl_s
        reserved: list[Block | None] = []
        for key in wish.keys:
            block = None
            if self._is_missing(key):
                block = self._dram.directory.reserve(
                    key,
                    holder_id,
                    deadline_s=deadline_s,
                    lifetime_s=wish.lifetime_s,
                    owner=wish.owner,
                )
                self._dram.counters.num_stores_dropped += block is None
            elif (present := self._dram.directory.find_readable(key)) is not None:
                present.num_uses += 1  # somebody computed it once more
            reserved.append(block)
        self.write_back.watch_level()
        return reserved

    def commit(self, rows: Sequence[Sequence[int]], holder_id: int) -> int:
        """Publish written blocks; rows as in Op.COMMIT. Returns how many were still reserved."""
        directory = self._dram.directory
        num_published = 0
        for slot, generation, num_tokens, num_bytes, checksum in rows:
            block = directory.find_reserved(slot, generation, holder_id)
            if block is not None and num_bytes <= self.block_bytes:
                stamp = BlockStamp(
                    block.key, generation, num_tokens, num_bytes, checksum, block.owner
                )
                num_published += directory.publish(block, stamp, time.monotonic())
        self._num_commits_refused += len(rows) - num_published
        return num_published

    def abort(self, rows: Sequence[Sequence[int]], holder_id: int) -> None:
        """Give reserved slots back; nothing for those that are gone."""
        for slot, generation in rows:
            block = self._dram.directory.find_reserved(slot, generation, holder_id)
            if block is not None:
                self._dram.directory.abort(block)

    def discard(self, keys: Sequence[bytes]) -> int:
        """Drop blocks from all tiers, except those under a lease; returns how many."""
        num_dropped = 0
        for key in keys:
            block = self._dram.directory.find_readable(key)
            if block is not None:
                if block.num_leases > count_own_pins(block):
                    continue
                self._dram.directory.drop(block)
                self._dram.counters.evictions["discarded"] += 1
            is_on_disk = self.write_back.discard_from_nvme(key)
            num_dropped += block is not None or is_on_disk
        return num_dropped

    def purge(self, owner: bytes) -> int:
        """Drop an owner's blocks from all tiers, except those under a lease; returns how many."""
        self._num_purges += 1
        keys = {*self._dram.directory.keys_of(owner), *self._nvme.keys_of(owner)}
        return self.discard(sorted(keys))

    def listed(self, tier: Tier, start: int, owner: bytes) -> tuple[int, list[Block]]:
        """Some readable blocks of a tier, of one owner if it is given, and where to go on (0: end)."""
        stop = start + LIST_STEP
        holder = self._nvme if tier is Tier.NVME else self._dram.directory
        blocks = holder.listed(start, stop)
        shown = [b for b in blocks if b.is_readable and owner in (b"", b.owner)]
        return (stop if len(blocks) == LIST_STEP else 0), shown

    def suspect(self, key: bytes, generation: int) -> None:
        """A holder read bytes that are not those of the stamp: nobody else shall."""
        self._dram.suspect(key, generation)

    def count_moves(self, *, is_load: bool, num_bytes: int, seconds: float) -> None:
        """A holder copied so much out of the slab, or into it."""
        counters = self._dram.counters
        (counters.loads if is_load else counters.stores).add(num_bytes, seconds)

    # holders and time

    def hear_holder(self, holder_id: int) -> None:
        """A holder asks for something, so it writes nothing at this time."""
        self._dram.directory.end_rest(holder_id)

    def forget_holder(self, holder_id: int) -> None:
        """A holder's connection is gone: so are its promises."""
        self._dram.directory.forget_holder(holder_id)

    def expire(self, now_s: float) -> None:
        """End what has run out."""
        expired = self._dram.directory.expire(now_s)
        self._dram.counters.evictions["expired"] += expired.num_blocks
        self._nvme.keep_watch(now_s, self._limits.io_timeout_s)
        if expired.num_leases or expired.num_reservations:
            log.warning(
                "promises_ran_out",
                num_leases=expired.num_leases,
                num_reservations=expired.num_reservations,
            )
        self.write_back.watch_level()

    async def flush(self, deadline_s: float) -> None:
        """Write what only DRAM has to NVMe, within the deadline."""
        await self.write_back.flush(deadline_s)
        await self._nvme.sync()

    def stats(self, num_holders: int) -> KvdStats:
        """Both tiers as they stand."""
        directory = self._dram.directory
        return KvdStats(
            block_bytes=self.block_bytes,
            num_holders=num_holders,
            num_leases=directory.num_leases,
            num_reservations=directory.count_states()[SlotState.RESERVED],
            num_commits_refused=self._num_commits_refused,
            num_purges=self._num_purges,
            tiers={Tier.DRAM.value: self._dram.stats(), Tier.NVME.value: self._nvme.stats()},
        )

    def _is_missing(self, key: bytes) -> bool:
        return self._dram.directory.find(key) is None and not self._nvme.has(key)

    def _count_miss(self, key: bytes) -> None:
        self._dram.counters.num_misses += 1
        self._nvme.counters.num_misses += not self._nvme.has(key)
