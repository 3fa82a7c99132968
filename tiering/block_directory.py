"""The index of one tier: which block lies in which slot, in which state, leased to whom.

Pure book-keeping: no bytes, no clock, no thread. Time comes in as `now_s`. Every promise is paired:
reserve with publish or abort, open_lease with release, pin with unpin; the first two also run out.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count

from tiering.block_stamp import BlockStamp
from tiering.errors import SlotMisuse
from tiering.eviction.evictor import Evictor
from tiering.slot_pool import SlotPool
from tiering.tier import SlotState

_READABLE = (SlotState.READY, SlotState.EVICTING)


@dataclass(slots=True, eq=False)
class Block:
    """One slot in use. `stamp` is None until the bytes are complete.

    `is_listed`: the index finds it; an unlisted block only waits for its last lease.
    `lifetime_s`: seconds from publication to its drop; None is without end.
    """

    key: bytes
    slot: int
    generation: int
    state: SlotState
    holder_id: int
    deadline_s: float | None = None
    lifetime_s: float | None = None
    stamp: BlockStamp | None = None
    num_leases: int = 0
    is_listed: bool = True

    @property
    def is_readable(self) -> bool:
        """The bytes are complete and a new lease may be given."""
        return self.is_listed and self.state in _READABLE


@dataclass(slots=True)
class _Lease:
    holder_id: int
    deadline_s: float
    blocks: list[Block] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Expired:
    """What ran out in one call of `expire`."""

    num_leases: int
    num_reservations: int
    num_blocks: int


class _Timer(Enum):
    LEASE = auto()
    RESERVATION = auto()
    LIFETIME = auto()


class BlockDirectory:
    """Index and book-keeping of one tier with `num_slots` slots.

    `new_evictor` makes the two queues: blocks with a lifetime go before all others.
    `first_generation` is above every generation that the tier's slots may still carry.
    """

    def __init__(
        self, num_slots: int, new_evictor: Callable[[], Evictor], first_generation: int = 1
    ) -> None:
        self._pool = SlotPool(num_slots)
        self._lasting = new_evictor()
        self._short_lived = new_evictor()
        self._generations = count(first_generation)
        self._index: dict[bytes, Block] = {}
        self._by_slot: dict[int, Block] = {}
        self._states: Counter[SlotState] = Counter()
        self._leases: dict[int, _Lease] = {}
        self._lease_ids = count(1)
        self._timers: list[tuple[float, int, _Timer, int, int]] = []
        self._timer_order = count()

    # questions

    @property
    def num_slots(self) -> int:
        """Slots of the tier in all."""
        return self._pool.num_slots

    @property
    def num_free(self) -> int:
        """Slots that a reservation can get."""
        return self._pool.num_free

    @property
    def num_used(self) -> int:
        """Slots in any state but FREE (quarantined ones not counted)."""
        return self._pool.num_used

    @property
    def num_quarantined(self) -> int:
        """Slots out of use."""
        return self._pool.num_quarantined

    @property
    def num_leases(self) -> int:
        """Leases alive."""
        return len(self._leases)

    def count_states(self) -> dict[SlotState, int]:
        """Slots per state; quarantined slots are in none."""
        counts = {state: self._states[state] for state in SlotState}
        counts[SlotState.FREE] = self.num_free
        return counts

    def find(self, key: bytes) -> Block | None:
        """The listed block of this key, in whatever state."""
        return self._index.get(key)

    def find_readable(self, key: bytes) -> Block | None:
        """The block of this key if its bytes are complete."""
        block = self._index.get(key)
        return block if block is not None and block.is_readable else None

    def find_reserved(self, slot: int, generation: int, holder_id: int) -> Block | None:
        """The unpublished block that this holder reserved, unless the reservation is gone."""
        block = self._by_slot.get(slot)
        if block is None or (block.generation, block.holder_id) != (generation, holder_id):
            return None
        return None if block.state in _READABLE or not block.is_listed else block

    def next_victims(self, num_blocks: int) -> list[Block]:
        """Blocks in the order they should go; none is leased or pinned. Changes nothing."""
        keys = self._short_lived.next_victims(num_blocks)
        keys += self._lasting.next_victims(num_blocks - len(keys))
        return [self._index[key] for key in keys]

    def readable_by_age(self) -> list[Block]:
        """All readable blocks, least recently used first, leased ones last."""
        victims = self.next_victims(len(self._lasting) + len(self._short_lived))
        held = [b for b in self._index.values() if b.is_readable and b.num_leases]
        return victims + held

    # reserve, publish, abort

    def reserve(
        self,
        key: bytes,
        holder_id: int,
        *,
        state: SlotState = SlotState.RESERVED,
        deadline_s: float | None = None,
        lifetime_s: float | None = None,
    ) -> Block | None:
        """Take a slot for a key; None when the key is present in any state or no slot is free."""
        if key in self._index:
            return None
        slot = self._pool.take()
        if slot is None:
            return None
        block = Block(key, slot, next(self._generations), state, holder_id, deadline_s, lifetime_s)
        self._index[key] = block
        self._by_slot[slot] = block
        self._states[state] += 1
        if deadline_s is not None:
            self._start_timer(deadline_s, _Timer.RESERVATION, slot, block.generation)
        return block

    def publish(self, block: Block, stamp: BlockStamp, now_s: float) -> bool:
        """Make a reserved block visible; False when its reservation is gone or has run out."""
        if self._by_slot.get(block.slot) is not block or block.state in _READABLE:
            return False
        if block.deadline_s is not None and now_s >= block.deadline_s:
            self._free(block)
            return False
        block.stamp = stamp
        self._set_state(block, SlotState.READY)
        self._admit(block)
        if block.lifetime_s is not None:
            dies_at_s = now_s + block.lifetime_s
            self._start_timer(dies_at_s, _Timer.LIFETIME, block.slot, block.generation)
        return True

    def abort(self, block: Block) -> None:
        """Give an unpublished block's slot back; nothing if that already happened."""
        if self._by_slot.get(block.slot) is block and block.state not in _READABLE:
            self._free(block)

    def adopt(self, stamps: dict[int, BlockStamp]) -> None:
        """List blocks that survived in their slots (slot -> stamp), oldest generation first.

        Raises:
            SlotMisuse: one of the slots is in use.
        """
        self._pool.take_exactly(set(stamps))
        for slot, stamp in sorted(stamps.items(), key=lambda item: item[1].generation):
            block = Block(stamp.key, slot, stamp.generation, SlotState.READY, 0, stamp=stamp)
            self._index[stamp.key] = block
            self._by_slot[slot] = block
            self._states[SlotState.READY] += 1
            self._admit(block)

    # leases and pins

    def open_lease(self, holder_id: int, deadline_s: float) -> int:
        """Start an empty lease; returns its id."""
        lease_id = next(self._lease_ids)
        self._leases[lease_id] = _Lease(holder_id, deadline_s)
        self._start_timer(deadline_s, _Timer.LEASE, lease_id, 0)
        return lease_id

    def lease(self, lease_id: int, block: Block) -> bool:
        """Put a readable block under a lease; False when the lease is gone."""
        lease = self._leases.get(lease_id)
        if lease is None or not block.is_readable:
            return False
        self.pin(block)
        self._set_state(block, SlotState.READY)  # rescues a block that is being written back
        lease.blocks.append(block)
        return True

    def shorten(self, lease_id: int, num_blocks: int) -> None:
        """Let go of all but the first `num_blocks` of a lease."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            self._unpin_all(lease.blocks[num_blocks:])
            del lease.blocks[num_blocks:]

    def release(self, lease_id: int, holder_id: int) -> bool:
        """End a lease; False when it is gone already or another holder's."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.holder_id != holder_id:
            return False
        del self._leases[lease_id]
        self._unpin_all(lease.blocks)
        return True

    def pin(self, block: Block) -> None:
        """Keep the block's slot as it is until `unpin`; for kvd's own reads."""
        block.num_leases += 1
        if block.num_leases == 1:
            self._withdraw(block)

    def unpin(self, block: Block) -> None:
        """End a pin; the last one frees an unlisted block and makes others evictable."""
        block.num_leases -= 1
        if block.num_leases:
            return
        if block.is_listed:
            self._admit(block)
        else:
            self._free(block)

    # leaving

    def begin_eviction(self, block: Block) -> None:
        """Mark and pin a READY block whose bytes are about to be written back."""
        self.pin(block)
        self._set_state(block, SlotState.EVICTING)

    def end_eviction(self, block: Block) -> bool:
        """Drop and unpin the block unless it was leased meanwhile; True when its slot is free."""
        is_leaving = block.state is SlotState.EVICTING and block.num_leases == 1
        if is_leaving:
            self.drop(block)
        elif block.state is SlotState.EVICTING:
            self._set_state(block, SlotState.READY)
        self.unpin(block)
        return is_leaving

    def drop(self, block: Block) -> None:
        """Take a readable block out of the index now, and free its slot after the last lease."""
        if not block.is_listed:
            return
        self._withdraw(block)
        block.is_listed = False
        del self._index[block.key]
        if block.num_leases == 0:
            self._free(block)

    def quarantine(self, block: Block) -> None:
        """Unlist a block that nobody else reads and never use its slot again.

        Raises:
            SlotMisuse: another lease or pin than the caller's own is alive.
        """
        if block.num_leases > 1:
            raise SlotMisuse(block.slot, "is still being read")
        self._withdraw(block)
        self._forget(block)
        self._pool.quarantine(block.slot)

    def forget_holder(self, holder_id: int) -> None:
        """Abort the reservations and end the leases of a holder that is gone."""
        reserved = [b for b in self._by_slot.values() if b.holder_id == holder_id]
        for block in reserved:
            if block.state is SlotState.RESERVED:
                self.abort(block)
        for lease_id in [i for i, held in self._leases.items() if held.holder_id == holder_id]:
            self.release(lease_id, holder_id)

    def expire(self, now_s: float) -> Expired:
        """End what has run out at `now_s`: leases, reservations, blocks with a lifetime."""
        ended: Counter[_Timer] = Counter()
        while self._timers and self._timers[0][0] <= now_s:
            _, _, timer, ident, generation = heapq.heappop(self._timers)
            ended[timer] += self._run_out(timer, ident, generation)
        return Expired(ended[_Timer.LEASE], ended[_Timer.RESERVATION], ended[_Timer.LIFETIME])

    def _run_out(self, timer: _Timer, ident: int, generation: int) -> bool:
        if timer is _Timer.LEASE:
            lease = self._leases.get(ident)
            return lease is not None and self.release(ident, lease.holder_id)
        block = self._by_slot.get(ident)
        if block is None or block.generation != generation:
            return False
        if timer is _Timer.RESERVATION:
            is_open = block.state not in _READABLE
            self.abort(block)
            return is_open
        was_listed = block.is_listed
        self.drop(block)
        return was_listed

    def _start_timer(self, deadline_s: float, timer: _Timer, ident: int, generation: int) -> None:
        entry = (deadline_s, next(self._timer_order), timer, ident, generation)
        heapq.heappush(self._timers, entry)

    def _unpin_all(self, blocks: Iterable[Block]) -> None:
        # Tail first, so that the head of a run is the youngest: a run is of use only from its head.
        for block in reversed(list(blocks)):
            self.unpin(block)

    def _queue_of(self, block: Block) -> Evictor:
        return self._lasting if block.lifetime_s is None else self._short_lived

    def _admit(self, block: Block) -> None:
        self._queue_of(block).admit(block.key)

    def _withdraw(self, block: Block) -> None:
        # An unlisted block's key may belong to a newer block by now.
        if block.is_listed:
            self._queue_of(block).withdraw(block.key)

    def _set_state(self, block: Block, state: SlotState) -> None:
        self._states[block.state] -= 1
        self._states[state] += 1
        block.state = state

    def _forget(self, block: Block) -> None:
        if block.is_listed:
            del self._index[block.key]
            block.is_listed = False
        del self._by_slot[block.slot]
        self._states[block.state] -= 1
        block.state = SlotState.FREE

    def _free(self, block: Block) -> None:
        self._forget(block)
        self._pool.give_back(block.slot)
