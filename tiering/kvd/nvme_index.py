"""What kvd keeps in memory about a slab file: which block lies where, and who has to make room."""

from __future__ import annotations

from collections.abc import Iterable

from tiering.block import Block
from tiering.block_directory import BlockDirectory
from tiering.block_stamp import BlockStamp
from tiering.kvd.admission import AdmissionFilter
from tiering.kvd.nvme_limits import NvmeLimits
from tiering.kvd.unit_order import UnitOrder
from tiering.tier import SlotState

_KVD = 0  # holder id of kvd's own slots


class NvmeIndex:
    """Directory, order of the units, and admission filter over `num_slots` slots.

    A tier that is cut anew gets a new index. `first_generation` as in `BlockDirectory`.
    """

    def __init__(
        self, num_slots: int, unit_slots: int, limits: NvmeLimits, first_generation: int = 1
    ) -> None:
        self.directory = BlockDirectory(
            num_slots, limits.new_evictor, first_generation, limits.tenant_share
        )
        self.units = UnitOrder(num_slots // unit_slots, unit_slots, limits.new_evictor)
        self.filter = AdmissionFilter(num_slots, limits.max_writes_per_hit)

    @property
    def occupancy(self) -> float:
        """Share of the slots in use."""
        return self.directory.num_used / self.directory.num_slots

    def adopt(self, newest: dict[int, BlockStamp]) -> None:
        """List the blocks that survived a restart, oldest first."""
        self.directory.adopt(newest)
        for slot in newest:
            self.units.use(slot)

    def place(self, stamps: Iterable[BlockStamp]) -> list[Block]:
        """A slot for each block, as far as there is room."""
        placed = []
        for stamp in stamps:
            block = self.directory.reserve(
                stamp.key, _KVD, state=SlotState.WRITING, owner=stamp.owner
            )
            if block is None:
                break
            placed.append(block)
        return placed

    def make_room(self, num_blocks: int) -> int:
        """Drop what is above somebody's share block by block, and then whole units; how many."""
        directory = self.directory
        num_dropped = 0
        num_wanted = min(num_blocks, directory.num_slots)
        for victim in directory.next_greedy_victims(max(num_wanted - directory.num_free, 0)):
            directory.drop(victim, is_evicted=True)
            num_dropped += 1
        units = self.units.pop_victims()
        while directory.num_free < num_wanted and (slots := next(units, None)) is not None:
            for block in filter(None, map(directory.find_in_slot, slots)):
                if block.is_readable and not block.num_leases:
                    directory.drop(block, is_evicted=True)
                    num_dropped += 1
        return num_dropped
