"""Small blocks that share a unit of the slab file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiering.block_stamp import BlockStamp
from tiering.errors import SlotCorrupt
from tiering.stores.block_store import ByteArray, payload_checksum
from tiering.stores.nvme_slab import NvmeSlab
from tiering.stores.slab_file import aligned_array

BLOCK_BYTES = 10_000
FILE_BYTES = 4 << 20  # 240-odd slots: units of 15


def make_block(seed: int, num_bytes: int = BLOCK_BYTES) -> tuple[BlockStamp, ByteArray]:
    payload = aligned_array(12_288)
    payload[:num_bytes] = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    checksum = payload_checksum(payload[:num_bytes])
    return BlockStamp(seed.to_bytes(16, "big"), seed, 16, num_bytes, checksum, b"owner..."), payload


def write_run(slab: NvmeSlab, slot: int, seeds: list[int]) -> None:
    stamps, payloads = zip(*map(make_block, seeds), strict=True)
    slab.write_run(slot, stamps, payloads)


def read_run(slab: NvmeSlab, slot: int, seeds: list[int]) -> list[bool]:
    """Which blocks are there; those that are must be right."""
    stamps, payloads = zip(*map(make_block, seeds), strict=True)
    into = [aligned_array(12_288) for _ in seeds]
    errors = slab.read_run(slot, stamps, into)
    for payload, array, error in zip(payloads, into, errors, strict=True):
        assert error is not None or (array[:BLOCK_BYTES] == payload[:BLOCK_BYTES]).all()
    return [error is None for error in errors]


@pytest.fixture
def slab(tmp_path: Path) -> Iterator[NvmeSlab]:
    made = NvmeSlab(tmp_path / "slab", FILE_BYTES)
    made.lay_out(BLOCK_BYTES)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("block_bytes", "unit_slots"), [(4096, 256), (360 << 10, 23), (1 << 20, 8), (8 << 20, 1)]
)
def test_a_unit_holds_a_mebibyte_at_least(
    tmp_path: Path, block_bytes: int, unit_slots: int
) -> None:
    path = tmp_path / "slab"
    slab = NvmeSlab(path, 600 << 20)
    slab.lay_out(block_bytes)
    assert slab.unit_slots == unit_slots
    assert slab.unit_slots * slab.slot_bytes >= 1 << 20
    slab.close()


def test_a_small_file_keeps_sixteen_units(slab: NvmeSlab) -> None:
    assert slab.unit_slots == 15
    assert slab.num_units == 22


def test_a_whole_unit_is_one_write_and_one_read(
    slab: NvmeSlab, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real_write, real_read = os.pwritev, os.preadv

    def pwritev(fd: int, parts: list[memoryview], offset: int) -> int:
        calls.append(f"write {sum(part.nbytes for part in parts)}")
        return real_write(fd, parts, offset)

    def preadv(fd: int, parts: list[memoryview], offset: int) -> int:
        calls.append(f"read {sum(part.nbytes for part in parts)}")
        return real_read(fd, parts, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(os, "preadv", preadv)
    unit_bytes = 15 * 12_288 + 4096
    write_run(slab, 15, list(range(15)))
    assert calls == [f"write {unit_bytes}"]
    assert all(read_run(slab, 15, list(range(15))))
    assert calls[1:] == [f"read {unit_bytes}"]
    write_run(slab, 15, list(range(20, 35)))
    assert calls[2:] == [f"write {unit_bytes}"]
    write_run(slab, 15, [40, 41])
    assert calls[3:] == ["write 4096", "write 24576", "write 4096"]  # invalidated first


class Torn(Exception):
    """The process ends here."""


@pytest.mark.parametrize("num_bytes", [0, 4096, 40_960, 15 * 12_288, 15 * 12_288 + 4096])
def test_of_a_unit_whose_writing_was_cut_short_no_wrong_block_is_read(
    slab: NvmeSlab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    write_run(slab, 15, list(range(15)))

    def pwritev(fd: int, parts: list[memoryview], offset: int) -> int:
        with (tmp_path / "slab").open("r+b") as file:  # past O_DIRECT
            file.seek(offset)
            file.write(b"".join(parts)[:num_bytes])
        raise Torn

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", pwritev)
        with pytest.raises(Torn):
            write_run(slab, 15, list(range(20, 35)))
    slab.close()
    again = NvmeSlab(tmp_path / "slab", FILE_BYTES)
    old, new = read_run(again, 15, list(range(15))), read_run(again, 15, list(range(20, 35)))
    num_overwritten = -(-num_bytes // 12_288)
    is_whole = num_bytes > 15 * 12_288
    assert new == [is_whole] * 15
    assert old == [not is_whole and slot >= num_overwritten for slot in range(15)]
    again.close()


def test_after_a_refused_write_of_a_whole_unit_it_holds_no_block(
    slab: NvmeSlab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(slab, 15, list(range(15)))
    real_write = os.pwritev

    def pwritev(fd: int, parts: list[memoryview], offset: int) -> int:
        if sum(part.nbytes for part in parts) > 100_000:
            raise OSError(errno.EIO, "sick disk")
        return real_write(fd, parts, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", pwritev)
        with pytest.raises(OSError, match="sick"):
            write_run(slab, 15, list(range(20, 35)))
    write_run(slab, 29, [50])
    slab.close()
    again = NvmeSlab(tmp_path / "slab", FILE_BYTES)
    found, damaged = again.scan(range(again.num_units))
    assert damaged == []
    assert found == {29: make_block(50)[0]}
    again.close()


def test_a_run_leaves_its_neighbours_in_the_unit_alone(slab: NvmeSlab) -> None:
    write_run(slab, 15, list(range(15)))
    write_run(slab, 18, [100, 101])
    seeds = [0, 1, 2, 100, 101, *range(5, 15)]
    assert all(read_run(slab, 15, seeds))
    assert slab.inspect(18) == make_block(100)[0]
    assert slab.inspect(20) == make_block(5)[0]


def test_a_bad_block_in_a_run_is_the_only_one_refused(slab: NvmeSlab) -> None:
    write_run(slab, 0, list(range(10)))
    slab.invalidate(3)
    assert read_run(slab, 0, list(range(10))) == [number != 3 for number in range(10)]


def test_a_run_never_leaves_its_unit(slab: NvmeSlab) -> None:
    with pytest.raises(ValueError, match="unit"):
        write_run(slab, 14, [1, 2])
    with pytest.raises(ValueError, match="unit"):
        read_run(slab, 14, [1, 2])


def test_a_reopened_slab_rewrites_a_table_without_losing_its_neighbours(
    slab: NvmeSlab, tmp_path: Path
) -> None:
    write_run(slab, 0, list(range(15)))
    slab.close()
    again = NvmeSlab(tmp_path / "slab", FILE_BYTES)
    again.invalidate(4)
    write_run(again, 7, [50])
    found, damaged = again.scan(range(again.num_units))
    assert damaged == []
    expected = {n: make_block(n)[0] for n in range(15) if n != 4} | {7: make_block(50)[0]}
    assert found == expected
    again.close()


def test_a_larger_file_keeps_its_blocks_where_they_are(slab: NvmeSlab, tmp_path: Path) -> None:
    write_run(slab, 15, list(range(15)))
    slab.close()
    again = NvmeSlab(tmp_path / "slab", 2 * FILE_BYTES)
    assert again.num_units == 44
    assert all(read_run(again, 15, list(range(15))))
    again.close()


def test_a_short_block_is_followed_by_zeros_on_the_disk(slab: NvmeSlab, tmp_path: Path) -> None:
    stamp, payload = make_block(1, num_bytes=100)
    payload[100:] = 0x5A  # what another block left in the DRAM slot
    slab.write(0, stamp, payload)
    slab.close()
    assert not any((tmp_path / "slab").read_bytes()[4096 * 2 : 4096 + 12_288])


operations = st.lists(
    st.tuples(st.sampled_from(["write", "invalidate"]), st.integers(0, 29), st.integers(1, 15)),
    max_size=25,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations)
def test_the_headers_on_the_disk_are_those_of_the_last_writes(
    slab: NvmeSlab, history: list[tuple[str, int, int]]
) -> None:
    slab.lay_out(BLOCK_BYTES)
    held: dict[int, int] = {}
    for step, (verb, slot, length) in enumerate(history):
        if verb == "invalidate":
            slab.invalidate(slot)
            held.pop(slot, None)
            continue
        num_slots = min(length, 15 - slot % 15)
        seeds = [1000 * step + index for index in range(num_slots)]
        write_run(slab, slot, seeds)
        held |= {slot + index: seed for index, seed in enumerate(seeds)}
    found, damaged = slab.scan(range(slab.num_units))
    assert damaged == []
    assert found == {slot: make_block(seed)[0] for slot, seed in held.items()}
    for slot, seed in held.items():
        slab.read(slot, make_block(seed)[0], np.empty(BLOCK_BYTES, dtype=np.uint8))


def test_a_stamp_of_another_owner_is_another_block(slab: NvmeSlab) -> None:
    stamp, payload = make_block(1)
    slab.write(0, stamp, payload)
    other = BlockStamp(
        stamp.key, stamp.generation, stamp.num_tokens, stamp.num_bytes, stamp.checksum
    )
    with pytest.raises(SlotCorrupt, match="another block"):
        slab.read(0, other, np.empty(BLOCK_BYTES, dtype=np.uint8))
