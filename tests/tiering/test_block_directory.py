"""The index of one tier: book-keeping under every order of events."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tiering.block import Block
from tiering.block_directory import BlockDirectory
from tiering.block_stamp import BlockStamp
from tiering.eviction.arc import ArcEvictor
from tiering.eviction.evictor import NewEvictor
from tiering.eviction.lfu import LfudaEvictor, LfuEvictor
from tiering.eviction.lru import LruEvictor
from tiering.eviction.s3_fifo import S3FifoEvictor
from tiering.tier import SlotState

NUM_SLOTS = 6
HOLDER, OTHER_HOLDER = 1, 2
OWNERS = (b"", b"tenant 1", b"tenant 2")


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def stamp_of(block: Block) -> BlockStamp:
    return BlockStamp(block.key, block.generation, 16, 4096, 7)


def new_directory(num_slots: int = NUM_SLOTS) -> BlockDirectory:
    return BlockDirectory(num_slots, LruEvictor)


def put(
    directory: BlockDirectory, number: int, *, now_s: float = 0.0, lifetime_s: float | None = None
) -> Block:
    block = directory.reserve(key_of(number), HOLDER, deadline_s=now_s + 10, lifetime_s=lifetime_s)
    assert block is not None
    assert directory.publish(block, stamp_of(block), now_s)
    return block


def test_nothing_is_visible_before_the_commit() -> None:
    directory = new_directory()
    block = directory.reserve(key_of(1), HOLDER, deadline_s=10)
    assert block is not None
    assert directory.find_readable(key_of(1)) is None
    directory.publish(block, stamp_of(block), 1)
    assert directory.find_readable(key_of(1)) is block


def test_a_commit_at_the_deadline_is_refused_and_frees_the_slot() -> None:
    directory = new_directory()
    block = directory.reserve(key_of(1), HOLDER, deadline_s=10)
    assert block is not None
    assert not directory.publish(block, stamp_of(block), 10)
    assert directory.num_free == NUM_SLOTS


def test_a_commit_for_a_slot_that_has_a_new_owner_finds_nothing() -> None:
    directory = new_directory(1)
    late = directory.reserve(key_of(1), HOLDER, deadline_s=10)
    assert late is not None
    assert directory.expire(11).num_reservations == 1
    directory.end_rest(HOLDER)
    new = directory.reserve(key_of(2), OTHER_HOLDER, deadline_s=30)
    assert new is not None
    assert directory.find_reserved(late.slot, late.generation, HOLDER) is None
    assert not directory.publish(late, stamp_of(late), 12)
    assert directory.find(key_of(2)) is new


def test_a_slot_whose_writer_went_silent_is_nobodys_until_that_one_is_heard_of_or_gone() -> None:
    """It may be frozen in the middle of a copy, and others read slots in place."""
    directory = new_directory(2)
    for number in (1, 2):
        assert directory.reserve(key_of(number), HOLDER, deadline_s=10) is not None
    assert directory.expire(11).num_reservations == 2
    assert directory.find(key_of(1)) is None
    assert directory.count_states()[SlotState.RESERVED] == 0
    assert directory.reserve(key_of(1), OTHER_HOLDER, deadline_s=30) is None, "no slot is free"
    directory.end_rest(OTHER_HOLDER)
    assert directory.num_free == 0
    directory.end_rest(HOLDER)
    assert directory.num_free == 2

    assert directory.reserve(key_of(1), HOLDER, deadline_s=20) is not None
    directory.expire(21)
    directory.forget_holder(HOLDER)
    assert directory.num_free == 2


def test_another_holder_cannot_commit_or_release_what_it_does_not_hold() -> None:
    directory = new_directory()
    block = directory.reserve(key_of(1), HOLDER, deadline_s=10)
    assert block is not None
    assert directory.find_reserved(block.slot, block.generation, OTHER_HOLDER) is None
    directory.publish(block, stamp_of(block), 0)
    lease_id = directory.open_lease(HOLDER, 10)
    directory.lease(lease_id, block)
    assert not directory.release(lease_id, OTHER_HOLDER)
    assert directory.next_victims(NUM_SLOTS) == []


def test_a_key_has_at_most_one_slot() -> None:
    directory = new_directory()
    put(directory, 1)
    assert directory.reserve(key_of(1), OTHER_HOLDER, deadline_s=10) is None


def test_the_least_recently_leased_block_goes_first_and_the_tail_before_the_head() -> None:
    directory = new_directory()
    blocks = [put(directory, number) for number in range(4)]
    lease_id = directory.open_lease(HOLDER, 10)
    for block in blocks[:3]:
        directory.lease(lease_id, block)
    assert directory.next_victims(9) == [blocks[3]]
    directory.release(lease_id, HOLDER)
    assert directory.next_victims(9) == [blocks[3], blocks[2], blocks[1], blocks[0]]


def test_blocks_with_a_lifetime_go_first_and_vanish_in_time() -> None:
    directory = new_directory()
    lasting = put(directory, 1)
    short = put(directory, 2, lifetime_s=5)
    assert directory.next_victims(9) == [short, lasting]
    assert directory.expire(4.9).num_blocks == 0
    assert directory.expire(5).num_blocks == 1
    assert directory.find(key_of(2)) is None
    assert directory.find(key_of(1)) is lasting


def test_a_block_that_dies_under_a_lease_keeps_its_slot_until_the_lease_ends() -> None:
    directory = new_directory()
    block = put(directory, 1, lifetime_s=5)
    lease_id = directory.open_lease(HOLDER, 100)
    directory.lease(lease_id, block)
    directory.expire(6)
    assert directory.find(key_of(1)) is None
    assert directory.num_used == 1
    newer = put(directory, 1, now_s=6)
    assert newer.slot != block.slot
    directory.release(lease_id, HOLDER)
    assert directory.num_used == 1
    assert directory.next_victims(9) == [newer]


def test_a_frozen_holders_lease_runs_out() -> None:
    directory = new_directory()
    block = put(directory, 1)
    lease_id = directory.open_lease(HOLDER, 30)
    directory.lease(lease_id, block)
    assert directory.expire(30).num_leases == 1
    assert directory.next_victims(9) == [block]
    assert not directory.lease(lease_id, block)


def test_a_lease_rescues_a_block_that_is_being_written_back() -> None:
    directory = new_directory()
    block = put(directory, 1)
    directory.begin_eviction(block)
    assert block.state is SlotState.EVICTING
    lease_id = directory.open_lease(HOLDER, 30)
    assert directory.lease(lease_id, block)
    assert not directory.end_eviction(block)
    assert directory.find_readable(key_of(1)) is block
    directory.release(lease_id, HOLDER)
    assert directory.next_victims(9) == [block]


def test_a_written_back_block_leaves_the_index_with_its_slot() -> None:
    directory = new_directory()
    block = put(directory, 1)
    directory.begin_eviction(block)
    assert directory.end_eviction(block)
    assert directory.find(key_of(1)) is None
    assert directory.num_free == NUM_SLOTS


def test_a_dead_holder_leaves_nothing_behind() -> None:
    directory = new_directory()
    kept = put(directory, 1)
    directory.reserve(key_of(2), HOLDER, deadline_s=10)
    others = directory.reserve(key_of(3), OTHER_HOLDER, deadline_s=10)
    directory.lease(directory.open_lease(HOLDER, 10), kept)
    directory.forget_holder(HOLDER)
    assert directory.num_leases == 0
    assert directory.find(key_of(2)) is None
    assert directory.find(key_of(3)) is others
    assert directory.next_victims(9) == [kept]


def test_adopted_blocks_are_found_and_the_oldest_goes_first() -> None:
    directory = BlockDirectory(4, LruEvictor, first_generation=10)
    directory.adopt(
        {
            3: BlockStamp(key_of(1), 9, 16, 4096, 7),
            1: BlockStamp(key_of(2), 5, 16, 4096, 7),
        }
    )
    assert [block.key for block in directory.next_victims(9)] == [key_of(2), key_of(1)]
    fresh = directory.reserve(key_of(3), HOLDER, deadline_s=10)
    assert fresh is not None
    assert (fresh.slot, fresh.generation) == (0, 10)


class DirectoryMachine(RuleBasedStateMachine):
    """Random events against the promises that must hold after each of them."""

    new_evictor: NewEvictor = LruEvictor

    def __init__(self) -> None:
        super().__init__()
        new_evictor: NewEvictor = type(self).new_evictor
        self.directory = BlockDirectory(NUM_SLOTS, new_evictor, tenant_share=0.34)
        self.now_s = 0.0
        self.reserved: list[Block] = []
        self.evicting: list[Block] = []
        self.leased: dict[int, tuple[int, float, list[Block]]] = {}

    numbers = st.integers(0, 9)
    holders = st.sampled_from([HOLDER, OTHER_HOLDER])

    @rule(
        number=numbers,
        holder=holders,
        ttl_s=st.sampled_from([1.0, 5.0]),
        lifetime_s=st.sampled_from([None, 3.0]),
    )
    def reserve(self, number: int, holder: int, ttl_s: float, lifetime_s: float | None) -> None:
        was_present = self.directory.find(key_of(number)) is not None
        had_room = self.directory.num_free > 0
        block = self.directory.reserve(
            key_of(number),
            holder,
            deadline_s=self.now_s + ttl_s,
            lifetime_s=lifetime_s,
            owner=OWNERS[number % 3],
        )
        assert (block is not None) == (had_room and not was_present)
        if block is not None:
            self.reserved.append(block)

    @rule(data=st.data(), is_commit=st.booleans())
    def settle(self, data: st.DataObject, *, is_commit: bool) -> None:
        if not self.reserved:
            return
        block = data.draw(st.sampled_from(self.reserved))
        self.reserved.remove(block)
        found = self.directory.find_reserved(block.slot, block.generation, block.holder_id)
        assert found in (block, None)
        if not is_commit:
            self.directory.abort(block)
            return
        is_in_time = block.deadline_s is not None and self.now_s < block.deadline_s
        is_published = self.directory.publish(block, stamp_of(block), self.now_s)
        assert is_published == (is_in_time and found is block)

    @rule(keys=st.lists(numbers, max_size=4, unique=True), holder=holders)
    def acquire(self, keys: list[int], holder: int) -> None:
        blocks = [self.directory.find_readable(key_of(number)) for number in keys]
        deadline_s = self.now_s + 4
        lease_id = self.directory.open_lease(holder, deadline_s)
        held = [b for b in blocks if b is not None and self.directory.lease(lease_id, b)]
        self.leased[lease_id] = (holder, deadline_s, held)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leased:
            lease_id = data.draw(st.sampled_from(sorted(self.leased)))
            holder, _, _ = self.leased.pop(lease_id)
            assert self.directory.release(lease_id, holder)
            assert not self.directory.release(lease_id, holder)

    @rule(count=st.integers(1, 3))
    def begin_eviction(self, count: int) -> None:
        for victim in self.directory.next_victims(count):
            self.directory.begin_eviction(victim)
            self.evicting.append(victim)

    @rule()
    def end_eviction(self) -> None:
        if self.evicting:
            self.directory.end_eviction(self.evicting.pop(0))

    @rule(number=numbers)
    def drop(self, number: int) -> None:
        block = self.directory.find_readable(key_of(number))
        if block is not None:
            self.directory.drop(block)
            assert self.directory.find(key_of(number)) is None

    @rule(passed_s=st.sampled_from([0.5, 2.0, 6.0]))
    def pass_time(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.directory.expire(self.now_s)
        self.leased = {i: held for i, held in self.leased.items() if held[1] > self.now_s}

    @rule(holder=holders)
    def hear_holder(self, holder: int) -> None:
        self.directory.end_rest(holder)

    @rule(holder=holders)
    def lose_holder(self, holder: int) -> None:
        self.directory.forget_holder(holder)
        self.leased = {i: held for i, held in self.leased.items() if held[0] != holder}
        assert not [
            b
            for b in self.reserved
            if b.holder_id == holder and b.is_listed and b.state is SlotState.RESERVED
        ]

    @invariant()
    def slots_are_conserved(self) -> None:
        directory = self.directory
        total = directory.num_free + directory.num_used + directory.num_quarantined
        assert total == NUM_SLOTS
        assert sum(directory.count_states().values()) == NUM_SLOTS
        assert min(directory.count_states().values()) >= 0

    @invariant()
    def no_leased_block_is_evictable_or_lost(self) -> None:
        victims = self.directory.next_victims(NUM_SLOTS)
        held = [block for _, _, blocks in self.leased.values() for block in blocks]
        assert not set(victims) & set(held)
        assert not set(victims) & set(self.evicting)
        for block in held:
            assert block.state in (SlotState.READY, SlotState.EVICTING)
            assert block.num_leases > 0

    @invariant()
    def slots_of_owners_add_up(self) -> None:
        victims = self.directory.next_victims(NUM_SLOTS)
        assert len({victim.key for victim in victims}) == len(victims)
        assert sum(self.directory.num_owned.values()) <= self.directory.num_used
        assert all(number > 0 for number in self.directory.num_owned.values())

    @invariant()
    def no_two_living_blocks_share_a_slot(self) -> None:
        held = {b for _, _, blocks in self.leased.values() for b in blocks}
        living = held | set(self.directory.readable_by_age())
        assert len({block.slot for block in living}) == len(living)

    @invariant()
    def leases_alive_are_those_that_were_not_ended(self) -> None:
        assert self.directory.num_leases == len(self.leased)


class ArcMachine(DirectoryMachine):
    new_evictor = ArcEvictor


class LfuMachine(DirectoryMachine):
    new_evictor = LfuEvictor


class LfudaMachine(DirectoryMachine):
    new_evictor = LfudaEvictor


class S3FifoMachine(DirectoryMachine):
    new_evictor = S3FifoEvictor


DirectoryMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None
)
few = settings(max_examples=40, stateful_step_count=40, deadline=None)
for machine in (ArcMachine, LfuMachine, LfudaMachine, S3FifoMachine):
    machine.TestCase.settings = few
TestDirectoryMachine = DirectoryMachine.TestCase
TestArcMachine = ArcMachine.TestCase
TestLfuMachine = LfuMachine.TestCase
TestLfudaMachine = LfudaMachine.TestCase
TestS3FifoMachine = S3FifoMachine.TestCase
