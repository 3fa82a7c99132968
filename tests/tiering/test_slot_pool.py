"""The free list."""

from __future__ import annotations

import pytest

from tiering.errors import SlotMisuse
from tiering.slot_pool import SlotPool


def test_a_slot_given_back_is_the_last_to_be_taken_again() -> None:
    pool = SlotPool(3)
    assert pool.take() == 0
    pool.give_back(0)
    assert [pool.take() for _ in range(4)] == [1, 2, 0, None]


def test_a_double_free_is_refused() -> None:
    pool = SlotPool(1)
    pool.take()
    pool.give_back(0)
    with pytest.raises(SlotMisuse, match="slot 0: is not in use"):
        pool.give_back(0)


def test_a_quarantined_slot_does_not_come_back() -> None:
    pool = SlotPool(2)
    pool.take()
    pool.quarantine(0)
    assert [pool.take(), pool.take()] == [1, None]
    assert (pool.num_free, pool.num_used, pool.num_quarantined) == (0, 1, 1)


def test_a_slot_in_use_cannot_be_taken_by_name() -> None:
    pool = SlotPool(3)
    pool.take()
    with pytest.raises(SlotMisuse, match="is not free"):
        pool.take_exactly({0, 1})
