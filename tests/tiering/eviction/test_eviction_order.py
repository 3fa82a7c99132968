"""Whose blocks go first."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tiering.eviction.eviction_order import NO_OWNER, EvictionOrder
from tiering.eviction.lru import LruEvictor

FLOOD, CALM = b"flooding", b"calmness"


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def put(order: EvictionOrder, number: int, owner: bytes, *, is_lasting: bool = True) -> None:
    order.take_slot(owner)
    order.admit(key_of(number), owner, is_lasting=is_lasting)


def test_a_tenant_above_its_share_loses_its_own_oldest_blocks_first() -> None:
    order = EvictionOrder(10, LruEvictor, tenant_share=0.4)
    for number in range(3):
        put(order, number, CALM)
    for number in range(10, 17):
        put(order, number, FLOOD)
    assert order.next_victims(2) == [key_of(10), key_of(11)]
    assert order.next_greedy_victims(9) == [key_of(10), key_of(11), key_of(12)]
    # ... down to its share; from there on by age
    assert order.next_victims(5) == [key_of(n) for n in (10, 11, 12, 0, 1)]
    assert len(order.next_victims(99)) == 10


def test_leased_blocks_count_for_the_share_and_are_not_proposed() -> None:
    order = EvictionOrder(10, LruEvictor, tenant_share=0.2)
    for number in range(4):
        put(order, number, FLOOD)
    order.withdraw(key_of(0), FLOOD, is_lasting=True)
    assert order.next_greedy_victims(9) == [key_of(1), key_of(2)]


def test_without_shares_age_alone_counts() -> None:
    order = EvictionOrder(10, LruEvictor)
    put(order, 0, CALM)
    for number in range(1, 9):
        put(order, number, FLOOD)
    assert order.next_victims(2) == [key_of(0), key_of(1)]
    assert order.num_owned == {}


def test_blocks_of_nobody_are_nobodys_flood() -> None:
    order = EvictionOrder(10, LruEvictor, tenant_share=0.1)
    put(order, 0, CALM)
    for number in range(1, 10):
        put(order, number, NO_OWNER)
    assert order.next_greedy_victims(9) == []
    assert order.next_victims(1) == [key_of(0)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "lease", "release", "gone"]),
            st.integers(0, 12),
            st.sampled_from([FLOOD, CALM, NO_OWNER]),
            st.booleans(),
        ),
        max_size=80,
    )
)
def test_victims_are_the_evictable_blocks_each_once_and_shares_add_up(
    history: list[tuple[str, int, bytes, bool]],
) -> None:
    order = EvictionOrder(10, LruEvictor, tenant_share=0.3)
    held: dict[int, tuple[bytes, bool]] = {}
    leased: set[int] = set()
    for verb, number, owner, is_lasting in history:
        if verb == "put" and number not in held:
            held[number] = (owner, is_lasting)
            put(order, number, owner, is_lasting=is_lasting)
        elif number in held:
            of, lasts = held[number]
            if verb == "lease":
                leased.add(number)
                order.withdraw(key_of(number), of, is_lasting=lasts)
            elif verb == "release":
                leased.discard(number)
                order.admit(key_of(number), of, is_lasting=lasts)
            elif verb == "gone":
                leased.discard(number)
                del held[number]
                order.remove(key_of(number), of, is_lasting=lasts, is_evicted=True)
                order.give_slot(of)
    evictable = sorted(key_of(number) for number in held.keys() - leased)
    assert sorted(order.next_victims(99)) == evictable
    assert len(order) == len(evictable)
    owners = Counter(of for of, _ in held.values() if of != NO_OWNER)
    assert order.num_owned == dict(owners)
    assert len(order.next_greedy_victims(99)) <= sum(max(n - 3, 0) for n in owners.values())
