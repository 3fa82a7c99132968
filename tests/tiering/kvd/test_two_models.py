"""Workers of two models on one node share its kvd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from tiering.errors import LayoutMismatch
from tiering.kvd.client import KvdClient

if TYPE_CHECKING:
    from conftest import KvdProcess

LARGE_BYTES, SMALL_BYTES = 10_000, 3_000
ByteArray = npt.NDArray[np.uint8]


def data_of(number: int, num_bytes: int) -> ByteArray:
    return np.random.default_rng(number).integers(0, 256, num_bytes, dtype=np.uint8)


def put(client: KvdClient, number: int, num_bytes: int) -> None:
    (reservation,) = client.reserve([number.to_bytes(16, "big")])
    assert reservation is not None
    client.write(reservation, data_of(number, num_bytes), 16)
    assert client.commit([reservation]) == 1


def has(client: KvdClient, number: int, num_bytes: int) -> bool:
    lease = client.acquire([number.to_bytes(16, "big")])
    into = np.empty(num_bytes, dtype=np.uint8)
    assert client.load(lease, 0, into)
    client.release(lease)
    return bool((into == data_of(number, num_bytes)).all())


def test_smaller_blocks_of_another_model_lie_beside_the_larger_ones(kvd: KvdProcess) -> None:
    kvd.start()
    large, small = kvd.client(), kvd.client(block_bytes=SMALL_BYTES)
    for number in range(0, 6, 2):
        put(large, number, LARGE_BYTES)
        put(small, number + 1, SMALL_BYTES)

    assert all(has(large, number, LARGE_BYTES) for number in range(0, 6, 2))
    assert all(has(small, number, SMALL_BYTES) for number in range(1, 6, 2))


def test_a_model_keeps_to_its_own_block_size(kvd: KvdProcess) -> None:
    kvd.start()
    kvd.client()
    small = kvd.client(block_bytes=SMALL_BYTES)
    (reservation,) = small.reserve([bytes(16)])
    assert reservation is not None
    with pytest.raises(ValueError, match="3001 bytes in a block of 3000"):
        small.write(reservation, data_of(1, SMALL_BYTES + 1), 16)


def test_a_model_with_larger_blocks_than_the_first_is_refused(kvd: KvdProcess) -> None:
    kvd.start()
    put(kvd.client(block_bytes=SMALL_BYTES), 1, SMALL_BYTES)
    with pytest.raises(LayoutMismatch):
        kvd.client()
