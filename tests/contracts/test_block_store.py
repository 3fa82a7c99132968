"""What every block store promises."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tiering.block_stamp import BlockStamp
from tiering.errors import SlotCorrupt
from tiering.stores.block_store import BlockStore, ByteArray, payload_checksum
from tiering.stores.dram_slab import DramSlab, create_slab_memory, map_slab_memory
from tiering.stores.nvme_slab import NvmeSlab

BLOCK_BYTES = 10_000  # no multiple of a page
SLAB_BYTES = 20 * 16_384


def make_block(seed: int, num_bytes: int = BLOCK_BYTES) -> tuple[BlockStamp, ByteArray]:
    rng = np.random.default_rng(seed)
    payload = rng.integers(0, 256, num_bytes, dtype=np.uint8)
    key = seed.to_bytes(16, "big")
    return BlockStamp(key, seed + 1, 16, num_bytes, payload_checksum(payload)), payload


@pytest.fixture(params=["dram", "nvme"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockStore]:
    made: BlockStore
    if request.param == "dram":
        fd = create_slab_memory(SLAB_BYTES)
        memory = map_slab_memory(fd, SLAB_BYTES, is_owner=True)
        os.close(fd)
        made = DramSlab(memory, BLOCK_BYTES)
    else:
        slab = NvmeSlab(tmp_path / "slab", SLAB_BYTES)
        slab.lay_out(BLOCK_BYTES)
        made = slab
    yield made
    made.close()


def test_a_block_comes_back_byte_for_byte(store: BlockStore) -> None:
    for slot in (0, 3, store.num_slots - 1):
        stamp, payload = make_block(slot)
        store.write(slot, stamp, payload)
    for slot in (0, 3, store.num_slots - 1):
        stamp, payload = make_block(slot)
        into = np.empty(BLOCK_BYTES, dtype=np.uint8)
        store.read(slot, stamp, into)
        assert (into == payload).all()


def test_a_short_block_leaves_the_rest_of_the_destination_alone(store: BlockStore) -> None:
    stamp, payload = make_block(1, num_bytes=17)
    store.write(0, stamp, payload)
    into = np.full(BLOCK_BYTES, 5, dtype=np.uint8)
    store.read(0, stamp, into)
    assert (into[:17] == payload).all()
    assert (into[17:] == 5).all()


def test_a_neighbour_is_not_touched(store: BlockStore) -> None:
    for slot in range(3):
        store.write(slot, *make_block(slot))
    store.write(1, *make_block(9))
    into = np.empty(BLOCK_BYTES, dtype=np.uint8)
    for slot, seed in ((0, 0), (1, 9), (2, 2)):
        store.read(slot, make_block(seed)[0], into)


def test_the_bytes_of_another_block_are_refused(store: BlockStore) -> None:
    store.write(0, *make_block(1))
    stamp, _ = make_block(2)
    with pytest.raises(SlotCorrupt):
        store.read(0, stamp, np.empty(BLOCK_BYTES, dtype=np.uint8))


def test_a_block_that_does_not_fit_is_refused(store: BlockStore) -> None:
    stamp, payload = make_block(1, num_bytes=store.slot_bytes + 1)
    with pytest.raises(ValueError, match="fit"):
        store.write(0, stamp, payload)
    store.write(0, *make_block(1))
    with pytest.raises(ValueError, match="fit"):
        store.read(0, make_block(1)[0], np.empty(10, dtype=np.uint8))


def test_slots_are_pages(store: BlockStore) -> None:
    assert store.slot_bytes == 12_288
    assert store.num_slots >= 19


def test_threads_on_different_slots_do_not_disturb_each_other(store: BlockStore) -> None:
    def fill_and_check(slot: int) -> bool:
        stamp, payload = make_block(slot)
        into = np.empty(BLOCK_BYTES, dtype=np.uint8)
        for _ in range(20):
            store.write(slot, stamp, payload)
            store.read(slot, stamp, into)
        return bool((into == payload).all())

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(fill_and_check, range(12)))


def test_closing_twice_is_fine(store: BlockStore) -> None:
    store.close()
    store.close()
