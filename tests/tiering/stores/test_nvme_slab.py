"""The slab file: what survives damage, crashes, full disks."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tiering.block_stamp import BlockStamp
from tiering.errors import SlotCorrupt
from tiering.stores.block_store import PAGE_BYTES, ByteArray, payload_checksum
from tiering.stores.nvme_slab import NvmeSlab

BLOCK_BYTES = 8_192
FILE_BYTES = PAGE_BYTES + 16 * (PAGE_BYTES + BLOCK_BYTES)

WRITER = """
import sys
from pathlib import Path
import numpy as np
from tiering.block_stamp import BlockStamp
from tiering.stores.block_store import payload_checksum
from tiering.stores.nvme_slab import NvmeSlab

slab = NvmeSlab(Path(sys.argv[1]), int(sys.argv[2]))
if not slab.block_bytes:
    slab.lay_out(int(sys.argv[3]))
seed = int(sys.argv[4])
print("writing", flush=True)
while True:
    payload = np.random.default_rng(seed).integers(0, 256, slab.block_bytes, dtype=np.uint8)
    stamp = BlockStamp(seed.to_bytes(16, "big"), seed, 16, payload.nbytes, payload_checksum(payload))
    slab.write(seed % slab.num_slots, stamp, payload)
    seed += 1
"""


def make_block(seed: int, num_bytes: int = BLOCK_BYTES) -> tuple[BlockStamp, ByteArray]:
    payload = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    key = seed.to_bytes(16, "big")
    return BlockStamp(key, seed, 16, num_bytes, payload_checksum(payload)), payload


def open_slab(path: Path, num_bytes: int = FILE_BYTES) -> NvmeSlab:
    slab = NvmeSlab(path, num_bytes)
    if not slab.block_bytes:
        slab.lay_out(BLOCK_BYTES)
    return slab


def test_a_reopened_slab_knows_its_blocks(tmp_path: Path) -> None:
    slab = open_slab(tmp_path / "slab")
    stamp, payload = make_block(7)
    slab.write(3, stamp, payload)
    slab.close()
    slab = NvmeSlab(tmp_path / "slab", FILE_BYTES)
    found = [slab.inspect(slot) for slot in range(slab.num_slots)]
    assert found == [stamp if slot == 3 else None for slot in range(16)]
    into = np.empty(BLOCK_BYTES, dtype=np.uint8)
    slab.read(3, stamp, into)
    assert (into == payload).all()
    slab.close()


def test_payload_of_an_old_layout_is_blank_and_no_damage(tmp_path: Path) -> None:
    slab = open_slab(tmp_path / "slab")
    for slot in range(slab.num_slots):
        slab.write(slot, *make_block(slot))
    slab.lay_out(512)
    slab.close()
    again = NvmeSlab(tmp_path / "slab", FILE_BYTES)
    assert again.scan(range(again.num_units)) == ({}, [])
    again.close()


def test_a_new_layout_forgets_the_blocks_of_the_old_one(tmp_path: Path) -> None:
    slab = open_slab(tmp_path / "slab")
    stamp, payload = make_block(7)
    slab.write(0, stamp, payload)
    slab.lay_out(BLOCK_BYTES)
    assert slab.inspect(0) is None
    with pytest.raises(SlotCorrupt):
        slab.read(0, stamp, payload)
    slab.close()


def test_an_invalidated_slot_is_empty(tmp_path: Path) -> None:
    slab = open_slab(tmp_path / "slab")
    stamp, payload = make_block(7)
    slab.write(0, stamp, payload)
    slab.invalidate(0)
    assert slab.inspect(0) is None
    slab.close()


def test_unaligned_memory_is_written_and_read_all_the_same(tmp_path: Path) -> None:
    slab = open_slab(tmp_path / "slab")
    stamp, payload = make_block(1, num_bytes=BLOCK_BYTES - 3)
    crooked = np.empty(BLOCK_BYTES, dtype=np.uint8)[3:]
    crooked[:] = payload
    slab.write(0, stamp, crooked)
    into = np.empty(BLOCK_BYTES, dtype=np.uint8)[3:]
    slab.read(0, stamp, into)
    assert (into == payload).all()
    slab.close()


@pytest.mark.parametrize("offset", [*range(0, 100, 4), 99])
def test_a_flipped_byte_anywhere_in_the_header_is_found(tmp_path: Path, offset: int) -> None:
    slab = open_slab(tmp_path / "slab")
    stamp, payload = make_block(1)
    slab.write(0, stamp, payload)
    flip_byte(tmp_path / "slab", PAGE_BYTES + BLOCK_BYTES + offset)
    with pytest.raises(SlotCorrupt, match="header"):
        slab.read(0, stamp, payload)
    slab.close()


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, BLOCK_BYTES - 1])
def test_a_flipped_byte_anywhere_in_the_payload_is_found(tmp_path: Path, offset: int) -> None:
    slab = open_slab(tmp_path / "slab")
    stamp, payload = make_block(1)
    slab.write(0, stamp, payload)
    flip_byte(tmp_path / "slab", PAGE_BYTES + offset)
    with pytest.raises(SlotCorrupt, match="payload"):
        slab.read(0, stamp, payload)
    slab.close()


def flip_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))
        file.flush()
        os.fsync(file.fileno())


def test_a_damaged_superblock_means_an_empty_slab(tmp_path: Path) -> None:
    slab = open_slab(tmp_path / "slab")
    slab.write(0, *make_block(1))
    slab.close()
    flip_byte(tmp_path / "slab", 20)
    slab = NvmeSlab(tmp_path / "slab", FILE_BYTES)
    assert (slab.block_bytes, slab.num_slots) == (0, 0)
    slab.lay_out(BLOCK_BYTES)
    assert [slab.inspect(slot) for slot in range(16)] == [None] * 16
    slab.close()


def test_a_short_file_is_a_corrupt_slot(tmp_path: Path) -> None:
    slab = open_slab(tmp_path / "slab")
    stamp, payload = make_block(1)
    slab.write(15, stamp, payload)
    os.truncate(tmp_path / "slab", FILE_BYTES // 2)
    with pytest.raises(SlotCorrupt, match="short"):
        slab.read(15, stamp, payload)
    slab.close()


def test_the_file_takes_exactly_what_it_may(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    open_slab(path).close()
    assert path.stat().st_size == FILE_BYTES
    open_slab(path, FILE_BYTES // 2).close()
    assert path.stat().st_size == FILE_BYTES // 2


def test_a_second_process_cannot_open_the_same_slab(tmp_path: Path) -> None:
    slab = open_slab(tmp_path / "slab")
    with pytest.raises(BlockingIOError):
        NvmeSlab(tmp_path / "slab", FILE_BYTES)
    slab.close()


def test_a_disk_without_room_refuses_a_new_slab_and_keeps_an_old_one(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space") as caught:
        NvmeSlab(small_disk / "big", 64 << 20)
    assert caught.value.errno == errno.ENOSPC
    slab = open_slab(small_disk / "slab")
    stamp, payload = make_block(1)
    slab.write(0, stamp, payload)
    slab.close()
    slab = open_slab(small_disk / "slab", 64 << 20)
    assert slab.num_slots == 16
    assert slab.inspect(0) == stamp
    slab.close()


def test_a_writer_killed_at_random_leaves_no_wrong_block(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    rng = random.Random(5)  # noqa: S311  # moments, no secrets
    num_checked = 0
    for kill in range(10):
        argv = [
            sys.executable,
            "-c",
            WRITER,
            *map(str, (path, FILE_BYTES, BLOCK_BYTES, 1000 * kill)),
        ]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "writing\n"
            with pytest.raises(subprocess.TimeoutExpired):
                writer.wait(rng.uniform(0.005, 0.05))
            writer.kill()
        num_checked += check_all_slots(path)
    assert num_checked > 100


def check_all_slots(path: Path) -> int:
    """Every block that the slab gives out is the one that its key names."""
    slab = NvmeSlab(path, FILE_BYTES)
    into = np.empty(BLOCK_BYTES, dtype=np.uint8)
    num_checked = 0
    for slot in range(slab.num_slots):
        stamp = slab.inspect(slot)
        if stamp is not None:
            slab.read(slot, stamp, into)
            expected, payload = make_block(int.from_bytes(stamp.key, "big"))
            assert stamp == expected
            assert (into == payload).all()
            num_checked += 1
    slab.close()
    return num_checked
