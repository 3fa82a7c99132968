"""The index of one tier: which block lies in which slot, in which state, leased to whom.

Pure book-keeping: no bytes, no clock, no thread. Time comes in as `now_s`. Every promise is paired:
reserve with publish or abort, open_lease with release, pin with unpin; the first two also run out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count, islice

from tiering.block import READABLE, Block
from tiering.block_stamp import BlockStamp
from tiering.errors import SlotMisuse
from tiering.eviction.eviction_order import NO_OWNER, EvictionOrder
from tiering.eviction.evictor import NewEvictor
from tiering.slot_pool import SlotPool
from tiering.tier import SlotState
from tiering.timers import TimerKind, Timers


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


class BlockDirectory:
    """Index and book-keeping of one tier with `num_slots` slots.

    `new_evictor` and `tenant_share` as in `EvictionOrder`. `first_generation` is above every
    generation that the tier's slots may still carry.
    """

    def __init__(
        self,
        num_slots: int,
        new_evictor: NewEvictor,
        first_generation: int = 1,
        tenant_share: float | None = None,
    ) -> None:
        self._pool = SlotPool(num_slots)
        self._order = EvictionOrder(num_slots, new_evictor, tenant_share)
        self._generations = count(first_generation)
        self._index: dict[bytes, Block] = {}
        self._by_slot: dict[int, Block] = {}
        self._states: Counter[SlotState] = Counter()
        self._resting: dict[int, list[Block]] = {}
        self._leases: dict[int, _Lease] = {}
        self._lease_ids = count(1)
        self._timers = Timers()

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

    @property
    def num_owned(self) -> dict[bytes, int]:
        """Slots in use by owner, where shares are kept."""
        return self._order.num_owned

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
        return None if block.state in READABLE or not block.is_listed else block

    def next_victims(self, num_blocks: int) -> list[Block]:
        """Blocks in the order they should go; none is leased or pinned. Changes nothing."""
        return [self._index[key] for key in self._order.next_victims(num_blocks)]

    def next_greedy_victims(self, num_blocks: int) -> list[Block]:
        """The part of `next_victims` that lies above some owner's share of the slots."""
        return [self._index[key] for key in self._order.next_greedy_victims(num_blocks)]

    def find_in_slot(self, slot: int) -> Block | None:
        """What holds a slot, listed or not."""
        return self._by_slot.get(slot)

    def keys_of(self, owner: bytes) -> list[bytes]:
        """Keys of the readable blocks of one owner."""
        return [b.key for b in self._index.values() if b.owner == owner and b.is_readable]

    def listed(self, start: int, stop: int) -> list[Block]:
        """Listed blocks by position, in the order in which they came; fewer at the end."""
        return list(islice(self._index.values(), start, stop))

    def readable_by_age(self) -> list[Block]:
        """All readable blocks, least recently used first, leased ones last."""
        victims = self.next_victims(len(self._order))
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
        owner: bytes = NO_OWNER,
    ) -> Block | None:
        """Take a slot for a key; None when the key is present in any state or no slot is free."""
        if key in self._index:
            return None
        slot = self._pool.take()
        if slot is None:
            return None
        block = Block(key, slot, next(self._generations), state, holder_id, deadline_s, lifetime_s)
        block.owner = owner
        self._enter(block)
        if deadline_s is not None:
            self._timers.start(deadline_s, TimerKind.RESERVATION, slot, block.generation)
        return block

    def publish(self, block: Block, stamp: BlockStamp, now_s: float) -> bool:
        """Make a reserved block visible; False when its reservation is gone or has run out."""
        if not self._is_open(block):
            return False
        if block.deadline_s is not None and now_s >= block.deadline_s:
            self._free(block)
            return False
        block.stamp = stamp
        self._set_state(block, SlotState.READY)
        self._admit(block)
        if block.lifetime_s is not None:
            dies_at_s = now_s + block.lifetime_s
            self._timers.start(dies_at_s, TimerKind.LIFETIME, block.slot, block.generation)
        return True

    def abort(self, block: Block) -> None:
        """Give an unpublished block's slot back; nothing if that already happened."""
        if self._is_open(block):
            self._free(block)

    def end_rest(self, holder_id: int) -> None:
        """The holder is heard of: it writes into none of the slots whose time was over."""
        for block in self._resting.pop(holder_id, ()):
            self._free(block)

    def adopt(self, stamps: dict[int, BlockStamp]) -> None:
        """List blocks that survived in their slots (slot -> stamp), oldest generation first.

        Raises:
            SlotMisuse: one of the slots is in use.
        """
        self._pool.take_exactly(set(stamps))
        for slot, stamp in sorted(stamps.items(), key=lambda item: item[1].generation):
            block = Block(stamp.key, slot, stamp.generation, SlotState.READY, 0, stamp=stamp)
            block.owner = stamp.owner
            self._enter(block)
            self._admit(block)

    # leases and pins

    def open_lease(self, holder_id: int, deadline_s: float) -> int:
        """Start an empty lease; returns its id."""
        lease_id = next(self._lease_ids)
        self._leases[lease_id] = _Lease(holder_id, deadline_s)
        self._timers.start(deadline_s, TimerKind.LEASE, lease_id)
        return lease_id

    def lease(self, lease_id: int, block: Block) -> bool:
        """Put a readable block under a lease; False when the lease is gone."""
        lease = self._leases.get(lease_id)
        if lease is None or not block.is_readable:
            return False
        self.pin(block)
        self._set_state(block, SlotState.READY)  # rescues a block that is being written back
        block.num_uses += 1
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
            self.drop(block, is_evicted=True)
        elif block.state is SlotState.EVICTING:
            self._set_state(block, SlotState.READY)
        self.unpin(block)
        return is_leaving

    def drop(self, block: Block, *, is_evicted: bool = False) -> None:
        """Take a readable block out of the index now, and free its slot after the last lease.

        `is_evicted`: it goes to make room.
        """
        if not block.is_listed:
            return
        self._remove(block, is_evicted=is_evicted)
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
        self._remove(block, is_evicted=False)
        self._forget(block)
        self._pool.quarantine(block.slot)

    def forget_holder(self, holder_id: int) -> None:
        """Abort the reservations and end the leases of a holder that is gone."""
        self.end_rest(holder_id)
        reserved = [b for b in self._by_slot.values() if b.holder_id == holder_id]
        for block in reserved:
            if block.state is SlotState.RESERVED:
                self.abort(block)
        for lease_id in [i for i, held in self._leases.items() if held.holder_id == holder_id]:
            self.release(lease_id, holder_id)

    def expire(self, now_s: float) -> Expired:
        """End what has run out at `now_s`: leases, reservations, blocks with a lifetime, idle ones."""
        ended: Counter[TimerKind] = Counter()
        for timer, ident, generation in self._timers.pop_due(now_s):
            ended[timer] += self._run_out(timer, ident, generation)
        idle = self._order.find_expired(now_s)
        for key in idle:
            self.drop(self._index[key])
        num_blocks = ended[TimerKind.LIFETIME] + len(idle)
        return Expired(ended[TimerKind.LEASE], ended[TimerKind.RESERVATION], num_blocks)

    def _run_out(self, timer: TimerKind, ident: int, generation: int) -> bool:
        if timer is TimerKind.LEASE:
            lease = self._leases.get(ident)
            return lease is not None and self.release(ident, lease.holder_id)
        block = self._by_slot.get(ident)
        if block is None or block.generation != generation:
            return False
        if timer is TimerKind.RESERVATION:
            return self._is_open(block) and self._rest(block)
        was_listed = block.is_listed
        self.drop(block)
        return was_listed

    def _is_open(self, block: Block) -> bool:
        """Its holder may still publish or abort it."""
        is_unread = block.state not in READABLE and block.state is not SlotState.RESTING
        return is_unread and self._by_slot.get(block.slot) is block

    def _rest(self, block: Block) -> bool:
        """The key is free again, the slot not: whoever got it next could be overwritten."""
        del self._index[block.key]
        block.is_listed = False
        self._set_state(block, SlotState.RESTING)
        self._resting.setdefault(block.holder_id, []).append(block)
        return True

    def _unpin_all(self, blocks: Iterable[Block]) -> None:
        # Tail first, so that the head of a run is the youngest: a run is of use only from its head.
        for block in reversed(list(blocks)):
            self.unpin(block)

    def _enter(self, block: Block) -> None:
        self._index[block.key] = block
        self._by_slot[block.slot] = block
        self._states[block.state] += 1
        self._order.take_slot(block.owner)

    def _admit(self, block: Block) -> None:
        self._order.admit(block.key, block.owner, is_lasting=block.lifetime_s is None)

    # An unlisted block's key may belong to a newer block by now.

    def _withdraw(self, block: Block) -> None:
        if block.is_listed:
            self._order.withdraw(block.key, block.owner, is_lasting=block.lifetime_s is None)

    def _remove(self, block: Block, *, is_evicted: bool) -> None:
        if block.is_listed:
            is_lasting = block.lifetime_s is None
            self._order.remove(block.key, block.owner, is_lasting=is_lasting, is_evicted=is_evicted)

    def _set_state(self, block: Block, state: SlotState) -> None:
        if block.state is state:
            return
        self._states[block.state] -= 1
        self._states[state] += 1
        block.state = state

    def _forget(self, block: Block) -> None:
        if block.is_listed:
            del self._index[block.key]
            block.is_listed = False
        del self._by_slot[block.slot]
        self._order.give_slot(block.owner)
        self._states[block.state] -= 1
        block.state = SlotState.FREE

    def _free(self, block: Block) -> None:
        self._forget(block)
        self._pool.give_back(block.slot)
