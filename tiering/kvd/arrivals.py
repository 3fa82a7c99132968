"""Blocks that come from other nodes into DRAM slots."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from tiering.block import Block
from tiering.block_stamp import BlockStamp
from tiering.kvd.dram_tier import DramTier
from tiering.kvd.write_back import WriteBack
from tiering.stores.block_store import ByteArray
from tiering.tier import SlotState
from tiering.transports.block_transport import OfferedBlock

_KVD = 0  # holder id of kvd's own slots


class Arrivals:
    """Reserve, then publish or abort each. Runs on kvd's event loop."""

    def __init__(self, dram: DramTier, write_back: WriteBack) -> None:
        self._dram = dram
        self._write_back = write_back

    def view(self, block: Block) -> ByteArray:
        """The slot of a block that the caller holds."""
        return self._dram.slab.view(block.slot)

    async def reserve(self, offered: Sequence[OfferedBlock], deadline_s: float) -> list[Block]:
        """Slots for the first of these blocks, up to one that is here already or finds no room.

        As with promotion, a run longer than half of the slots would evict its own head.
        """
        directory = self._dram.directory
        fitting = offered[: max(directory.num_slots // 2, 1)]
        await self._write_back.wait_for_room(len(fitting), deadline_s)
        reserved: list[Block] = []
        for arrival in fitting:
            block = directory.reserve(
                arrival.stamp.key,
                _KVD,
                state=SlotState.LOADING,
                lifetime_s=arrival.lifetime_s,
                owner=arrival.stamp.owner,
            )
            if block is None:
                break
            reserved.append(block)
        self._write_back.watch_level()
        return reserved

    def publish(self, block: Block, stamp: BlockStamp) -> bool:
        """The block's bytes are complete and verified."""
        here = replace(stamp, generation=block.generation)
        return self._dram.directory.publish(block, here, time.monotonic())

    def abort(self, block: Block) -> None:
        """Give an unpublished block's slot back; nothing if it was published."""
        self._dram.directory.abort(block)
