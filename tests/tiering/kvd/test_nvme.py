"""The NVMe tier of a real kvd process: restarts, damage, full disks. Never a wrong byte."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from tiering.kvd.client import KvdClient
from tiering.kvd.stats import TierStats

if TYPE_CHECKING:
    from conftest import KvdProcess

BLOCK_BYTES = 10_000
PAGE_BYTES = 4096
SLOT_BYTES = 12_288
STRIDE_BYTES = SLOT_BYTES + PAGE_BYTES  # in a file this small a unit is one slot and its header
KEYS = [bytes([number]) * 16 for number in range(1, 13)]
Eventually = Callable[[Callable[[], bool]], None]


def payload_of(key: bytes) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng(key[0])
    return rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def put(client: KvdClient, keys: list[bytes], *, lifetime_s: float | None = None) -> int:
    reserved = [r for r in client.reserve(keys, lifetime_s=lifetime_s) if r is not None]
    for reservation in reserved:
        client.write(reservation, payload_of(reservation.key), 16)
    return client.commit(reserved)


def check(client: KvdClient, keys: list[bytes], *, tier: str | None = None) -> int:
    """Acquire, compare every byte, release; returns the length of the run."""
    lease = client.acquire(keys)
    into = np.empty(BLOCK_BYTES, dtype=np.uint8)
    for index, block in enumerate(lease.blocks):
        assert block.key == keys[index]
        assert tier in (None, block.tier)
        assert client.load(lease, index, into)
        assert (into == payload_of(block.key)).all()
    client.release(lease)
    return len(lease.blocks)


def nvme(client: KvdClient) -> TierStats:
    return client.stats().tiers["nvme"]


def fill_disk(kvd: KvdProcess, keys: list[bytes] = KEYS) -> None:
    """Leave the blocks on the slab file of a daemon that is down."""
    kvd.start(num_nvme_slots=16)
    client = kvd.client()
    assert put(client, keys) == len(keys)
    assert kvd.stop() == 0


def test_sigterm_writes_dram_back_and_a_restart_serves_it_from_nvme(kvd: KvdProcess) -> None:
    fill_disk(kvd)
    kvd.start(num_nvme_slots=16)
    client = kvd.client()
    assert client.find(KEYS) == 12
    assert check(client, KEYS, tier="nvme") == 12
    assert check(client, KEYS, tier="dram") == 12
    assert nvme(client).num_hits == 12
    assert client.stats().num_leases == 0


def test_a_block_with_a_lifetime_never_reaches_the_disk(kvd: KvdProcess) -> None:
    kvd.start(num_nvme_slots=16)
    client = kvd.client()
    put(client, KEYS[:2])
    put(client, KEYS[2:4], lifetime_s=600)
    kvd.stop()
    kvd.start(num_nvme_slots=16)
    client = kvd.client()
    assert [client.find([key]) for key in KEYS[:4]] == [1, 1, 0, 0]
    assert all(key not in kvd.slab_path.read_bytes() for key in KEYS[2:4])


def test_what_was_written_back_survives_a_sigkill(kvd: KvdProcess, eventually: Eventually) -> None:
    kvd.start(num_dram_slots=6, num_nvme_slots=16)
    client = kvd.client()
    for key in KEYS:
        assert put(client, [key]) == 1
    eventually(lambda: nvme(client).slots_by_state["ready"] >= 7)
    on_disk = [key for key in KEYS if key in kvd.slab_path.read_bytes()]
    kvd.kill()
    kvd.start(num_dram_slots=6, num_nvme_slots=16)
    client = kvd.client()
    assert len(on_disk) >= 7
    assert sum(check(client, [key], tier="nvme") for key in on_disk) == len(on_disk)


def test_without_the_first_block_of_a_chain_nothing_is_found(kvd: KvdProcess) -> None:
    fill_disk(kvd)
    overwrite(kvd.slab_path, header_offset(kvd.slab_path, KEYS[0]), bytes(PAGE_BYTES))
    kvd.start(num_nvme_slots=16)
    client = kvd.client()
    assert client.find(KEYS) == 0
    assert check(client, KEYS) == 0
    assert check(client, [KEYS[1], KEYS[0], *KEYS[2:]]) == 1
    assert nvme(client).num_hits == 1, "what nobody can use is not brought up"
    assert check(client, KEYS[1:]) == 11


def test_a_working_set_above_both_tiers_stays_under_the_caps(kvd: KvdProcess) -> None:
    kvd.start(num_dram_slots=8, num_nvme_slots=8)
    client = kvd.client()
    keys = [bytes([number]) * 16 for number in range(1, 200)]
    # How many blocks reach the disk depends on its speed: spills that cannot keep up are shed.
    for _ in range(20):
        for start in range(0, len(keys), 4):
            put(client, keys[start : start + 4])
            check(client, keys[max(start - 8, 0) : start])
        if client.stats().tiers["nvme"].evictions["capacity"] > 50:
            break
    stats = client.stats()
    assert kvd.slab_path.stat().st_size == PAGE_BYTES + 8 * STRIDE_BYTES
    for tier in stats.tiers.values():
        assert sum(tier.slots_by_state.values()) == 8
    assert stats.tiers["nvme"].evictions["capacity"] > 50
    assert stats.tiers["nvme"].num_checksum_failures == 0
    assert stats.tiers["dram"].num_checksum_failures == 0


def test_a_run_longer_than_dram_is_promoted_in_part(kvd: KvdProcess) -> None:
    fill_disk(kvd)
    kvd.start(num_dram_slots=8, num_nvme_slots=16)
    client = kvd.client()
    assert client.find(KEYS) == 12
    assert check(client, KEYS) == 4
    assert sum(check(client, [key]) for key in KEYS) == 12


def test_a_discarded_block_does_not_come_back_after_a_restart(
    kvd: KvdProcess, eventually: Eventually
) -> None:
    fill_disk(kvd)
    kvd.start(num_nvme_slots=16)
    client = kvd.client()
    check(client, KEYS[:3])
    client.discard(KEYS[2:5])
    eventually(lambda: nvme(client).slots_by_state["free"] == 7)
    kvd.kill()
    kvd.start(num_nvme_slots=16)
    client = kvd.client()
    assert [client.find([key]) for key in KEYS[:6]] == [1, 1, 0, 0, 0, 1]


def test_a_file_of_another_layout_is_cut_anew(kvd: KvdProcess) -> None:
    fill_disk(kvd)
    kvd.start(num_nvme_slots=16)
    client = kvd.client(block_bytes=20_000)
    assert client.find(KEYS) == 0
    assert nvme(client).slots_by_state["free"] == nvme(client).num_slots == 10
    client.close()
    kvd.kill()
    kvd.start(num_nvme_slots=16)
    assert kvd.client().find(KEYS) == 0


# damage


def header_offset(path: Path, key: bytes) -> int:
    """Where the header of the slot of this key begins in the file."""
    return path.read_bytes().index(key) // PAGE_BYTES * PAGE_BYTES


def slot_offset(path: Path, key: bytes) -> int:
    """Where the payload before that header begins."""
    return header_offset(path, key) - SLOT_BYTES


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def flip(path: Path, offset: int) -> None:
    byte = path.read_bytes()[offset]
    overwrite(path, offset, bytes([byte ^ 0x10]))


def flip_one_byte_in_each_of_ten_slots(path: Path) -> None:
    header = [SLOT_BYTES + place for place in (0, 9, 13, 30, 50, 62, 70, 90)]
    payload = [0, BLOCK_BYTES // 2]
    for key, inside in zip(KEYS, header + payload, strict=False):
        flip(path, slot_offset(path, key) + inside)


def flip_padding(path: Path) -> None:
    flip(path, slot_offset(path, KEYS[0]) + SLOT_BYTES - 1)
    flip(path, slot_offset(path, KEYS[1]) + STRIDE_BYTES - 1)


def flip_last_payload_byte(path: Path) -> None:
    flip(path, slot_offset(path, KEYS[5]) + BLOCK_BYTES - 1)


def swap_slots(path: Path) -> None:
    first, second = slot_offset(path, KEYS[2]), slot_offset(path, KEYS[7])
    data = path.read_bytes()
    overwrite(path, first, data[second : second + STRIDE_BYTES])
    overwrite(path, second, data[first : first + STRIDE_BYTES])


def swap_payloads(path: Path) -> None:
    first, second = slot_offset(path, KEYS[2]), slot_offset(path, KEYS[7])
    data = path.read_bytes()
    overwrite(path, first, data[second : second + BLOCK_BYTES])
    overwrite(path, second, data[first : first + BLOCK_BYTES])


def truncate_to_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def truncate_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def delete(path: Path) -> None:
    path.unlink()


def replace_by_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def damage_superblock(path: Path) -> None:
    flip(path, 14)


# damage -> fewest blocks that must still be served, most that may be, counted by a metric
WHILE_DOWN = [
    (flip_one_byte_in_each_of_ten_slots, 2, 2, True),
    (flip_padding, 12, 12, False),
    (flip_last_payload_byte, 11, 11, True),
    (swap_slots, 10, 10, True),
    (swap_payloads, 10, 10, True),
    (truncate_to_half, 1, 11, False),
    (truncate_to_nothing, 0, 0, False),
    (delete, 0, 0, False),
    (replace_by_a_directory, 0, 0, False),
    (damage_superblock, 0, 0, False),
]
WHILE_UP = [
    (flip_one_byte_in_each_of_ten_slots, 2, 2, True),
    (flip_last_payload_byte, 11, 11, True),
    (swap_slots, 10, 10, True),
    (swap_payloads, 10, 10, True),
    (truncate_to_half, 1, 11, True),
    (truncate_to_nothing, 0, 0, True),
    (delete, 12, 12, False),
]


def check_each(client: KvdClient, fewest: int, most: int, *, is_counted: bool) -> None:
    """Every block is a miss or right, the damage is counted, and serving goes on."""
    num_served = sum(check(client, [key]) for key in KEYS)
    assert fewest <= num_served <= most
    if is_counted:
        assert nvme(client).num_checksum_failures > 0
    assert check(client, KEYS) <= num_served
    put(client, KEYS)
    assert check(client, KEYS) == 12
    assert client.stats().num_leases == 0


@pytest.mark.parametrize(("damage", "fewest", "most", "is_counted"), WHILE_DOWN)
def test_damage_done_while_kvd_is_down_is_never_served(
    kvd: KvdProcess, damage: Callable[[Path], None], fewest: int, most: int, *, is_counted: bool
) -> None:
    fill_disk(kvd)
    damage(kvd.slab_path)
    kvd.start(num_nvme_slots=16)
    check_each(kvd.client(), fewest, most, is_counted=is_counted)
    assert kvd.stop() == 0


@pytest.mark.parametrize(("damage", "fewest", "most", "is_counted"), WHILE_UP)
def test_damage_done_while_kvd_runs_is_never_served(
    kvd: KvdProcess, damage: Callable[[Path], None], fewest: int, most: int, *, is_counted: bool
) -> None:
    fill_disk(kvd)
    kvd.start(num_nvme_slots=16)
    damage(kvd.slab_path)
    check_each(kvd.client(), fewest, most, is_counted=is_counted)
    assert kvd.stop() == 0


def test_a_bad_slot_is_quarantined_and_its_block_can_be_stored_anew(kvd: KvdProcess) -> None:
    fill_disk(kvd)
    kvd.start(num_nvme_slots=16)
    flip_last_payload_byte(kvd.slab_path)
    client = kvd.client()
    assert check(client, KEYS) == 5
    assert nvme(client).num_quarantined == 1
    assert sum(nvme(client).slots_by_state.values()) == 15
    assert client.find(KEYS) == 5
    assert put(client, [KEYS[5]]) == 1
    assert check(client, KEYS) == 12
    kvd.stop()
    kvd.start(num_nvme_slots=16)
    client = kvd.client()
    assert check(client, KEYS) == 12
    assert nvme(client).num_quarantined == 0


def test_a_file_that_may_not_be_read_turns_the_tier_off(kvd: KvdProcess, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    kvd.start(num_nvme_slots=16, nvme_path=blocked / "slab")
    client = kvd.client()
    assert nvme(client).health == "off"
    assert len(kvd.find_events("nvme_unusable")) == 1
    put(client, KEYS)
    assert check(client, KEYS) == 12


def test_a_file_that_becomes_usable_is_taken_into_use_without_a_restart(
    kvd: KvdProcess, tmp_path: Path, eventually: Eventually
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    kvd.start(num_nvme_slots=16, nvme_path=blocked / "slab", nvme_retry_s=0.3)
    client = kvd.client()
    put(client, KEYS)
    assert nvme(client).health == "off"
    blocked.unlink()
    eventually(lambda: nvme(client).health == "on")
    assert nvme(client).num_slots == 16
    assert check(client, KEYS) == 12
    assert kvd.stop() == 0
    kvd.start(num_nvme_slots=16, nvme_path=blocked / "slab")
    assert check(kvd.client(), KEYS, tier="nvme") == 12


# full disks


def test_a_disk_too_small_for_the_slab_turns_the_tier_off(
    kvd: KvdProcess, small_disk: Path
) -> None:
    kvd.start(num_nvme_slots=1000, nvme_path=small_disk / "slab")
    client = kvd.client()
    assert nvme(client).health == "off"
    assert len(kvd.find_events("nvme_unusable")) == 1
    assert (small_disk / "slab").stat().st_size == 0
    put(client, KEYS)
    assert check(client, KEYS) == 12


def test_a_disk_that_fills_up_makes_the_tier_read_only_and_serving_goes_on(
    kvd: KvdProcess, small_disk: Path, eventually: Eventually
) -> None:
    slab_path = small_disk / "slab"
    kvd.start(num_dram_slots=6, num_nvme_slots=16, nvme_path=slab_path)
    client = kvd.client()
    for key in KEYS[:6]:
        put(client, [key])
    eventually(lambda: nvme(client).slots_by_state["ready"] >= 1)
    with slab_path.open("r+b") as file:
        # Someone gives the slab's tail to other files: its slots have no room on the disk now.
        num_kept = PAGE_BYTES + 3 * STRIDE_BYTES
        file.truncate(num_kept)
        file.truncate(PAGE_BYTES + 16 * STRIDE_BYTES)
    with pytest.raises(OSError, match="No space"):
        (small_disk / "filler").write_bytes(bytes(4 << 20))
    for number in range(20, 120):
        key = bytes([number]) * 16
        assert put(client, [key]) == 1
        assert check(client, [key]) == 1
    assert nvme(client).health == "read_only"
    assert nvme(client).num_io_errors >= 1
    assert len(kvd.find_events("nvme_degraded")) == 1
    began_s = time.monotonic()
    assert kvd.stop() == 0
    assert time.monotonic() - began_s < 5
