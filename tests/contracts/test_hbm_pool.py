"""The contract of the HBM pool: blocks come out as they went in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tiering.lease import SharedSlab
from tiering.stores.dram_slab import DramSlab, create_slab_memory, map_slab_memory
from workers.hbm_pool import HbmPool, HostPool
from workers.kernels.device_pool import DevicePool

BLOCK_BYTES = 768
NewPool = Callable[[int], HbmPool]


@pytest.fixture(params=["host", "device"])
def new_pool(request: pytest.FixtureRequest) -> NewPool:
    """Makes a pool of some blocks; the device's one on the host, with a spare block."""
    if request.param == "host":
        return lambda num_blocks: HostPool(num_blocks, BLOCK_BYTES)
    return lambda num_blocks: DevicePool(num_blocks, BLOCK_BYTES, torch.device("cpu"), 1)


def write(pool: HbmPool, block_id: int, seed: int) -> None:
    pool.begin_write(block_id)[:] = content(seed)
    pool.finish_write(block_id)


def content(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES).astype(np.uint8)


def test_a_new_pool_is_as_large_as_asked_for_and_zero(new_pool: NewPool) -> None:
    pool = new_pool(5)

    assert (pool.num_blocks, pool.block_bytes) == (5, BLOCK_BYTES)
    assert not any(data.any() for data in pool.read(range(5)))


def test_more_blocks_than_any_staging_holds_come_out_as_they_went_in(new_pool: NewPool) -> None:
    pool = new_pool(40)
    order = np.random.default_rng(0).permutation(40).tolist()
    for block_id in order:
        write(pool, block_id, seed=block_id)
    pool.settle()

    for block_id, data in zip(reversed(order), pool.read(order[::-1]), strict=True):
        assert np.array_equal(data, content(block_id))


def test_a_write_that_was_given_up_changes_no_other_block(new_pool: NewPool) -> None:
    pool = new_pool(3)
    write(pool, 0, seed=1)
    pool.begin_write(1)[:] = 7
    write(pool, 2, seed=2)
    pool.settle()

    first, last = (data.copy() for data in pool.read([0, 2]))

    assert np.array_equal(first, content(1))
    assert np.array_equal(last, content(2))


def test_no_blocks_are_read_from_no_ids(new_pool: NewPool) -> None:
    assert list(new_pool(2).read([])) == []


@pytest.fixture
def slab() -> Iterator[tuple[DramSlab, SharedSlab]]:
    """Six slots as kvd has them for these blocks, and what it tells a holder of them."""
    num_bytes = 6 * 4096
    descriptor = create_slab_memory(num_bytes)
    own = DramSlab(map_slab_memory(descriptor, num_bytes, is_owner=True), BLOCK_BYTES)
    yield own, SharedSlab(descriptor, num_bytes, own.slot_bytes)
    own.close()
    os.close(descriptor)


def test_slots_of_a_slab_are_blocks_behind_the_pool_or_it_says_no(
    new_pool: NewPool, slab: tuple[DramSlab, SharedSlab]
) -> None:
    own, shared = slab
    pool = new_pool(3)
    write(pool, 2, seed=1)
    pool.settle()

    if not pool.attach(shared):
        pool.detach()
        return
    for slot in range(6):
        own.fill(slot, content(slot))

    got = [data.copy() for data in pool.read([2, *range(3, 9)])]
    for data, seed in zip(got, [1, 0, 1, 2, 3, 4, 5], strict=True):
        assert np.array_equal(data, content(seed))
    pool.detach()
    (first,) = (data.copy() for data in pool.read([2]))
    assert np.array_equal(first, content(1))
    assert not any(data.any() for data in pool.read(range(3, 9)))


def test_a_slab_of_other_slots_is_not_read(slab: tuple[DramSlab, SharedSlab]) -> None:
    pool = HostPool(3, BLOCK_BYTES)
    assert pool.attach(slab[1])
    assert not pool.attach(slab[1]._replace(slot_bytes=8192))
    assert not any(data.any() for data in pool.read(range(3, 9))), "and the one before is let go of"


def test_a_new_slab_takes_the_place_of_the_old_one(slab: tuple[DramSlab, SharedSlab]) -> None:
    own, shared = slab
    own.fill(0, content(1))
    own.fill(5, content(1))
    pool = HostPool(3, BLOCK_BYTES)
    assert pool.attach(shared)
    descriptor = create_slab_memory(4096)
    assert pool.attach(SharedSlab(descriptor, 4096, 4096))
    os.close(descriptor)
    assert not any(data.any() for data in pool.read(range(3, 9)))
