"""The contract of the HBM pool: blocks come out as they went in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

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
