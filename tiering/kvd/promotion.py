"""From NVMe up to DRAM, verified on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from tiering.block import Block
from tiering.kvd.dram_tier import DramTier
from tiering.kvd.nvme_tier import NvmeTier
from tiering.tier import SlotState

_KVD = 0  # holder id of kvd's own slots


class Promotion:
    """Loads under way, one per key however many holders wait for it."""

    def __init__(self, dram: DramTier, nvme: NvmeTier) -> None:
        self._dram = dram
        self._nvme = nvme
        self._loads: dict[bytes, asyncio.Task[None]] = {}

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

    def start(self, run: Sequence[bytes]) -> dict[bytes, asyncio.Task[None]]:
        """Begin or join the loads that a run needs, up to the first that finds no slot."""
        loads: dict[bytes, asyncio.Task[None]] = {}
        pairs: list[tuple[Block, Block]] = []
        for key in run:
            if self._dram.directory.find_readable(key) is not None:
                continue
            if key in self._loads:
                loads[key] = self._loads[key]
                continue
            pair = self._reserve_pair(key)
            if pair is None:
                break
            pairs.append(pair)
        return loads | self._start_loads(pairs)

    def _can_promote(self, key: bytes) -> bool:
        return self._dram.directory.find(key) is None and self._nvme.has(key)

    def _reserve_pair(self, key: bytes) -> tuple[Block, Block] | None:
        """The block on NVMe, pinned, and a DRAM slot for it."""
        source = self._nvme.pin(key)
        if source is None:
            return None
        target = self._dram.directory.reserve(
            key, _KVD, state=SlotState.LOADING, owner=source.owner
        )
        if target is None:
            self._nvme.unpin(source)
            return None
        return source, target

    def _start_loads(self, pairs: Sequence[tuple[Block, Block]]) -> dict[bytes, asyncio.Task[None]]:
        """One task for each group of neighbours on the disk."""
        by_slot = sorted(pairs, key=lambda pair: pair[0].slot)
        started: dict[bytes, asyncio.Task[None]] = {}
        for group in self._nvme.runs_of([source for source, _ in by_slot]):
            members = by_slot[group.start : group.stop]
            task = asyncio.ensure_future(self._load(members))
            started |= {target.key: task for _, target in members}
        self._loads |= started
        return started

    async def _load(self, pairs: Sequence[tuple[Block, Block]]) -> None:
        """Runs to the end of the read even if nobody waits any more: the slots are taken till then."""
        sources = [source for source, _ in pairs]
        targets = [target for _, target in pairs]
        try:
            views = [self._dram.slab.view(target.slot) for target in targets]
            stamps = await self._nvme.fetch_all(sources, views)
            for target, stamp in zip(targets, stamps, strict=True):
                if stamp is None:
                    self._dram.directory.abort(target)
                else:
                    here = replace(stamp, generation=target.generation)
                    self._dram.directory.publish(target, here, time.monotonic())
        finally:
            for target in targets:
                del self._loads[target.key]
