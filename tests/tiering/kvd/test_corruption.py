"""A thousand random corruptions of the slab file: each is found, and costs a recomputation only.

`POINTSMAN_TEST_CORRUPTIONS=1000 pytest -m slow tests/tiering/kvd/test_corruption.py`; a short form
runs with the other tests.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tiering.block_stamp import BlockStamp
from tiering.kvd.nvme_tier import NvmeTier, Source, StoreResult
from tiering.stores.block_store import PAGE_BYTES, payload_checksum
from tiering.stores.nvme_slab import NvmeSlab
from tiering.stores.slab_file import aligned_array
from tiering.stores.slot_header import ENTRY_BYTES

NUM_LONG = int(os.environ.get("POINTSMAN_TEST_CORRUPTIONS", "1000"))
NUM_SHORT = 40
BLOCK_BYTES, SLOT_BYTES = 5_000, 8_192
NUM_BLOCKS = 48
HEADER_BYTES = 100  # of an entry that say something
FILE_BYTES = PAGE_BYTES + 80 * (SLOT_BYTES + PAGE_BYTES)


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def source_of(key: bytes, version: int = 0) -> Source:
    """A block as its computation gives it."""
    payload = aligned_array(SLOT_BYTES)
    rng = np.random.default_rng([int.from_bytes(key, "big"), version])
    payload[:BLOCK_BYTES] = rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    checksum = payload_checksum(payload[:BLOCK_BYTES])
    return Source(BlockStamp(key, 1, 16, BLOCK_BYTES, checksum), payload)


class Rig:
    """A tier over a file that is being damaged."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.rng = random.Random(seed)  # noqa: S311  # no secrets
        self.tier = NvmeTier(None)
        self.num_touched = 0

    async def open(self, *, is_new: bool = False) -> None:
        self.slab = NvmeSlab(self.path, FILE_BYTES)
        self.tier = NvmeTier(self.slab)
        if is_new:
            self.tier.lay_out(BLOCK_BYTES)
        await self.tier.recover()

    async def fill(self) -> None:
        """Every block is on the disk, computed anew where it is not."""
        missing = [key_of(n) for n in range(NUM_BLOCKS) if not self.tier.has(key_of(n))]
        results = await self.tier.store_all([source_of(key) for key in missing])
        assert set(results) <= {StoreResult.STORED}

    async def fetch(self, key: bytes) -> bool:
        """The block is served; wrong bytes never are."""
        block = self.tier.pin(key)
        if block is None:
            return False
        into = aligned_array(SLOT_BYTES)
        if await self.tier.fetch(block, into) is None:
            return False
        assert (into[:BLOCK_BYTES] == source_of(key).payload[:BLOCK_BYTES]).all()
        return True

    # places in the file

    def slot_of(self, key: bytes) -> int:
        block = self.tier._index.directory.find_readable(key)
        assert block is not None
        return block.slot

    def payload_at(self, key: bytes) -> int:
        return self.slab._payload_offset(self.slot_of(key))

    def header_at(self, key: bytes) -> int:
        unit, index = divmod(self.slot_of(key), self.slab.unit_slots)
        return self.slab._table_offset(unit) + index * ENTRY_BYTES

    def read(self, offset: int, num_bytes: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(num_bytes)

    def write(self, offset: int, data: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def choose(self, count: int) -> list[bytes]:
        return [key_of(number) for number in self.rng.sample(range(NUM_BLOCKS), count)]


# Each damages the file and returns the keys that must not be served any more. Of two headers in one
# table the second may come back, when the living tier writes the table to wipe out the first.


def flip_payload(rig: Rig) -> set[bytes]:
    (key,) = rig.choose(1)
    offset = rig.payload_at(key) + rig.rng.randrange(BLOCK_BYTES)
    rig.write(offset, bytes([rig.read(offset, 1)[0] ^ 1 << rig.rng.randrange(8)]))
    return {key}


def flip_header(rig: Rig) -> set[bytes]:
    (key,) = rig.choose(1)
    offset = rig.header_at(key) + rig.rng.randrange(HEADER_BYTES)
    rig.write(offset, bytes([rig.read(offset, 1)[0] ^ 1 << rig.rng.randrange(8)]))
    return {key}


def truncate(rig: Rig) -> set[bytes]:
    keys = [key_of(number) for number in range(NUM_BLOCKS)]
    last = max(keys, key=rig.payload_at)
    cut = rig.rng.randrange(PAGE_BYTES, rig.payload_at(last))
    lost = {key for key in keys if rig.payload_at(key) + BLOCK_BYTES > cut}
    rig.num_touched = sum(rig.header_at(key) + HEADER_BYTES > cut for key in keys)
    os.truncate(rig.path, cut)
    if rig.rng.random() < 0.5:
        os.truncate(rig.path, FILE_BYTES)
    return lost


def swap_payloads(rig: Rig) -> set[bytes]:
    first, second = rig.choose(2)
    offsets = [rig.payload_at(key) for key in (first, second)]
    contents = [rig.read(offset, SLOT_BYTES) for offset in offsets]
    for offset, content in zip(offsets, reversed(contents), strict=True):
        rig.write(offset, content)
    return {first, second}


def swap_headers(rig: Rig) -> set[bytes]:
    first, second = rig.choose(2)
    offsets = [rig.header_at(key) for key in (first, second)]
    contents = [rig.read(offset, ENTRY_BYTES) for offset in offsets]
    for offset, content in zip(offsets, reversed(contents), strict=True):
        rig.write(offset, content)
    return set()


def stale_header(rig: Rig) -> set[bytes]:
    """A header of the slot's earlier life over the payload of the present one."""
    (key,) = rig.choose(1)
    slot = rig.slot_of(key)
    other = source_of(key, version=1)
    stale = BlockStamp(key, 1, 16, BLOCK_BYTES, other.stamp.checksum)
    present = rig.read(rig.header_at(key), ENTRY_BYTES)
    payload = rig.read(rig.payload_at(key), SLOT_BYTES)
    rig.slab.write(slot, stale, other.payload)
    old_header = rig.read(rig.header_at(key), ENTRY_BYTES)
    assert old_header != present
    rig.write(rig.payload_at(key), payload)
    return {key}


def stale_payload(rig: Rig) -> set[bytes]:
    """The payload of an earlier life under the present header."""
    (key,) = rig.choose(1)
    rig.write(rig.payload_at(key), source_of(key, version=1).payload.tobytes())
    return {key}


DAMAGES: list[Callable[[Rig], set[bytes]]] = [
    flip_payload,
    flip_header,
    truncate,
    swap_payloads,
    swap_headers,
    stale_header,
    stale_payload,
]


async def corrupt(path: Path, num_corruptions: int) -> None:
    rig = Rig(path, seed=4)
    await rig.open(is_new=True)
    for number in range(num_corruptions):
        await rig.fill()
        rig.num_touched = 2
        lost = DAMAGES[number % len(DAMAGES)](rig)
        if rig.rng.random() < 0.5:
            rig.tier.close()
            await rig.open()
        served = {key for n in range(NUM_BLOCKS) if await rig.fetch(key := key_of(n))}
        assert not served & lost, DAMAGES[number % len(DAMAGES)].__name__
        assert len(served) < NUM_BLOCKS  # it was found
        assert len(served) >= NUM_BLOCKS - rig.num_touched
        rig.tier.close()
        await rig.open()
        await rig.fill()
        assert all([await rig.fetch(key_of(n)) for n in range(NUM_BLOCKS)])
    rig.tier.close()


async def test_no_corruption_is_served_and_each_block_can_be_stored_anew(tmp_path: Path) -> None:
    await corrupt(tmp_path / "slab", NUM_SHORT)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_thousand_corruptions_are_all_found(tmp_path: Path) -> None:
    await corrupt(tmp_path / "slab", NUM_LONG)
