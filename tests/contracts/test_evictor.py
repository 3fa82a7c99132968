"""What every eviction policy promises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.eviction.evictor import Evictor
from tiering.eviction.lru import LruEvictor

POLICIES: list[Callable[[], Evictor]] = [LruEvictor]
events = st.lists(st.tuples(st.booleans(), st.binary(min_size=1, max_size=1)), max_size=60)


@pytest.mark.parametrize("new_evictor", POLICIES)
@given(events)
def test_victims_are_exactly_the_admitted_blocks_each_once(
    new_evictor: Callable[[], Evictor], history: list[tuple[bool, bytes]]
) -> None:
    evictor, evictable = new_evictor(), set()
    for is_admitted, key in history:
        if is_admitted:
            evictor.admit(key)
            evictable.add(key)
        else:
            evictor.withdraw(key)
            evictable.discard(key)
    victims = evictor.next_victims(1000)
    assert sorted(victims) == sorted(evictable)
    assert len(evictor) == len(evictable)


@pytest.mark.parametrize("new_evictor", POLICIES)
def test_proposing_victims_changes_nothing(new_evictor: Callable[[], Evictor]) -> None:
    evictor = new_evictor()
    for key in (b"a", b"b", b"c"):
        evictor.admit(key)
    assert evictor.next_victims(2) == evictor.next_victims(2)
    assert evictor.next_victims(2) == evictor.next_victims(3)[:2]
    assert evictor.next_victims(0) == []


def test_lru_proposes_the_least_recently_admitted_first() -> None:
    evictor = LruEvictor()
    for key in (b"a", b"b", b"c", b"a"):
        evictor.admit(key)
    assert evictor.next_victims(3) == [b"b", b"c", b"a"]
