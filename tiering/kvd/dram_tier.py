"""The DRAM tier of kvd: the slab that holders map, and its index."""

from __future__ import annotations

import mmap

import structlog

from tiering.block_directory import BlockDirectory
from tiering.eviction.evictor import NewEvictor
from tiering.kvd.stats import TierCounters, TierStats, snapshot
from tiering.stores.dram_slab import DramSlab

log = structlog.get_logger(__name__)


class DramTier:
    """Slab and index over one mapping of the memfd; no slots until `lay_out`."""

    def __init__(
        self, memory: mmap.mmap, new_evictor: NewEvictor, tenant_share: float | None = None
    ) -> None:
        self._memory = memory
        self._new_evictor = new_evictor
        self._tenant_share = tenant_share
        self.block_bytes = 0
        self.slab = DramSlab(memory, len(memory) + 1)
        self.directory = BlockDirectory(0, new_evictor)
        self.counters = TierCounters()

    def lay_out(self, block_bytes: int) -> None:
        """Cut the slab for blocks of this size; every block in it is gone.

        Raises:
            ValueError: a block has no byte.
        """
        self.slab = DramSlab(self._memory, block_bytes)
        self.directory = BlockDirectory(
            self.slab.num_slots, self._new_evictor, tenant_share=self._tenant_share
        )
        self.block_bytes = block_bytes
        log.info("dram_laid_out", block_bytes=block_bytes, num_slots=self.slab.num_slots)

    def suspect(self, key: bytes, generation: int) -> None:
        """Drop a block whose bytes are not those of its stamp."""
        block = self.directory.find_readable(key)
        if block is not None and block.generation == generation:
            self.counters.num_checksum_failures += 1
            self.directory.drop(block)
            num_failures = self.counters.num_checksum_failures
            if num_failures.bit_count() == 1:  # the 1st, 2nd, 4th, ...: no flood
                log.warning("dram_block_corrupt", slot=block.slot, num_failures=num_failures)

    def stats(self) -> TierStats:
        """The tier as it stands."""
        slot_bytes = self.slab.slot_bytes if self.block_bytes else 0
        return snapshot(self.directory, slot_bytes, self.counters, "on")
