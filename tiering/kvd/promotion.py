"""From NVMe up to DRAM, verified on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from tiering.block_directory import Block
from tiering.kvd.dram_tier import DramTier
from tiering.kvd.nvme_tier import NvmeTier
from tiering.tier import SlotState

_KVD = 0  # holder id of kvd's own slots


class Promotion:
    """Loads under way, one per key however many holders wait for it."""

    def __init__(self, dram: DramTier, nvme: NvmeTier) -> None:
        self._dram = dram
        self._nvme = nvme
        self._loads: dict[bytes, asyncio.Task[bool]] = {}

    def is_wanted(self, keys: Sequence[bytes]) -> bool:
        """The head run goes on behind what can be leased from DRAM at once."""
        for key in keys:
            if self._dram.directory.find_readable(key) is None:
                return key in self._loads or self._can_promote(key)
        return False

    def plan_run(self, keys: Sequence[bytes]) -> tuple[list[bytes], int]:
        """Head run after promotion, and how many blocks of it must come up now.

        One call promotes at most half of the DRAM slots: a longer run would evict its own head.
        """
        directory = self._dram.directory
        num_allowed = max(directory.num_slots // 2, 1)
        run: list[bytes] = []
        num_missing = 0
        for key in keys:
            if directory.find_readable(key) is None and key not in self._loads:
                if num_missing >= num_allowed or not self._can_promote(key):
                    break
                num_missing += 1
            run.append(key)
        return run, num_missing

    def start(self, run: Sequence[bytes]) -> dict[bytes, asyncio.Task[bool]]:
        """Begin or join the loads that a run needs, up to the first that finds no slot."""
        loads: dict[bytes, asyncio.Task[bool]] = {}
        for key in run:
            if self._dram.directory.find_readable(key) is not None:
                continue
            load = self._loads.get(key) or self._start_load(key)
            if load is None:
                break
            loads[key] = load
        return loads

    def _can_promote(self, key: bytes) -> bool:
        return self._dram.directory.find(key) is None and self._nvme.has(key)

    def _start_load(self, key: bytes) -> asyncio.Task[bool] | None:
        source = self._nvme.pin(key)
        if source is None:
            return None
        target = self._dram.directory.reserve(key, _KVD, state=SlotState.LOADING)
        if target is None:
            self._nvme.unpin(source)
            return None
        self._loads[key] = asyncio.ensure_future(self._load(source, target))
        return self._loads[key]

    async def _load(self, source: Block, target: Block) -> bool:
        """Runs to the end of the read even if nobody waits any more: the slot is taken till then."""
        try:
            stamp = await self._nvme.fetch(source, self._dram.slab.view(target.slot))
            if stamp is None:
                self._dram.directory.abort(target)
                return False
            stamp = replace(stamp, generation=target.generation)
            return self._dram.directory.publish(target, stamp, time.monotonic())
        finally:
            del self._loads[target.key]
