"""Book-keeping of the block pool."""

# ruff: noqa: S311 - random orders, no secrets
from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.block_table import BlockNotHeld, BlockPool, OutOfBlocks


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_conserved_in_any_order_of_calls(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(16)
    tables: list[list[int]] = []
    for number in range(300):
        wanted = rng.randrange(1, 6)
        found = pool.match([key(rng.randrange(number + 1))])
        if rng.random() < 0.5 and tables:
            pool.release(tables.pop(rng.randrange(len(tables))))
        elif found and rng.random() < 0.5:
            pool.hold(found)
            tables.append(found)
        elif wanted <= pool.num_available:
            tables.append(pool.allocate(wanted))
            pool.register(rng.choice(tables[-1]), key(number))
        else:
            with pytest.raises(OutOfBlocks):
                pool.allocate(wanted)
        if rng.random() < 0.01:
            pool.forget_cached()
        assert pool.num_used == len({block_id for table in tables for block_id in table})
        assert pool.num_free + pool.num_cached + pool.num_used == pool.num_total
    for table in tables:
        pool.release(table)
    assert pool.num_used == 0


def test_a_block_is_found_by_its_key_until_it_is_evicted() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, key(1))
    pool.register(second, key(2))
    pool.release([first, second])

    assert pool.match([key(1), key(2), key(3)]) == [first, second]
    pool.allocate(1)

    assert pool.match([key(1), key(2)]) == [first]


def test_the_tail_of_a_table_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    table = pool.allocate(4)
    for number, block_id in enumerate(table):
        pool.register(block_id, key(number))
    pool.release(table)

    evicted = [pool.allocate(1)[0] for _ in table]

    assert evicted == table[::-1]


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(2)
    cached, free = pool.allocate(2)
    pool.register(cached, key(1))
    pool.release([cached, free])

    assert pool.allocate(1) == [free]
    assert pool.match([key(1)]) == [cached]


def test_a_shared_block_stays_used_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(1)
    table = pool.allocate(1)
    pool.register(table[0], key(1))
    pool.hold(table)
    pool.release(table)

    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    pool.release(table)

    assert (pool.num_used, pool.num_cached) == (0, 1)


def test_the_second_copy_of_a_block_is_not_registered() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)

    assert pool.register(first, key(1))
    assert not pool.register(second, key(1))
    pool.release([second])

    assert pool.num_free == 1
    assert pool.match([key(1)]) == [first]


def test_a_failed_allocation_takes_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(OutOfBlocks, match="4 blocks wanted, 3 available"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_nobody_gives_back_or_registers_a_block_that_nobody_holds() -> None:
    pool = BlockPool(1)
    table = pool.allocate(1)
    pool.release(table)
    with pytest.raises(BlockNotHeld):
        pool.release(table)
    with pytest.raises(BlockNotHeld):
        pool.register(table[0], key(1))
    with pytest.raises(BlockNotHeld):
        pool.hold(table)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=20, unique=True), st.integers(0, 20))
def test_match_is_the_head_run_of_what_is_there(numbers: list[int], missing: int) -> None:
    pool = BlockPool(32)
    table = pool.allocate(len(numbers))
    gap = missing % (len(numbers) + 1)
    for place, (block_id, number) in enumerate(zip(table, numbers, strict=True)):
        if place != gap:
            pool.register(block_id, key(number))
    assert pool.match([key(number) for number in numbers]) == table[:gap]
