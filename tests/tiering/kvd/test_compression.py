"""A real kvd that packs blocks on their way to the disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest

from tiering.block_layout import BlockLayout
from tiering.errors import LayoutNotPacked
from tiering.kvd.client import KvdClient
from tiering.kvd.operator import KvdOperator

if TYPE_CHECKING:
    from conftest import KvdProcess

LAYOUT = BlockLayout(num_layers=2, block_tokens=16, num_kv_heads=2, head_dim=40, dtype="float32")
NAMESPACE = f"{LAYOUT.describe()}.0123456789abcdef"
KEYS = [bytes([number]) * 16 for number in range(1, 9)]
NUM_SLOTS = 16
Eventually = Callable[[Callable[[], bool]], None]


def start(kvd: KvdProcess, compression: str, **options: int) -> KvdClient:
    """A daemon that compresses, and a holder of our layout."""
    bytes_of_file = 4096 + NUM_SLOTS * (LAYOUT.block_bytes + 4096)
    kvd.start(nvme_bytes=bytes_of_file, nvme_compression=compression, **options)
    return kvd.client(block_bytes=LAYOUT.block_bytes, namespace=NAMESPACE)


def payload_of(key: bytes) -> npt.NDArray[np.uint8]:
    numbers = np.random.default_rng(key[0]).normal(size=LAYOUT.block_bytes // 4)
    return numbers.astype(np.float32).view(np.uint8)


def put(client: KvdClient) -> None:
    reserved = [r for r in client.reserve(KEYS) if r is not None]
    for reservation in reserved:
        client.write(reservation, payload_of(reservation.key), LAYOUT.block_tokens)
    assert client.commit(reserved) == len(KEYS)


def get(client: KvdClient) -> list[npt.NDArray[np.uint8]]:
    """The bytes of the head run."""
    lease = client.acquire(KEYS)
    into = [np.empty(LAYOUT.block_bytes, dtype=np.uint8) for _ in lease.blocks]
    good = [client.load(lease, index, target) for index, target in enumerate(into)]
    client.release(lease)
    return into[: good.index(False)] if False in good else into


def off_by(key: bytes, payload: npt.NDArray[np.uint8]) -> float:
    """Root mean square of the error, relative to the numbers."""
    exact = payload_of(key).view(np.float32)
    error = payload.view(np.float32) - exact
    return float(np.linalg.norm(error) / np.linalg.norm(exact))


@pytest.mark.parametrize(("compression", "most"), [("int8", 0.015), ("fp8", 0.04)])
def test_dram_gives_the_bytes_themselves_and_the_disk_numbers_near_them(
    kvd: KvdProcess, compression: str, most: float
) -> None:
    client = start(kvd, compression)
    put(client)
    assert all((b == payload_of(k)).all() for k, b in zip(KEYS, get(client), strict=True))
    assert kvd.stop() == 0
    client = start(kvd, compression)
    found = get(client)
    assert len(found) == len(KEYS)
    assert all(0 < off_by(key, block) < most for key, block in zip(KEYS, found, strict=True))
    stats = client.stats()
    assert stats.tiers["nvme"].form == f"{compression}.v1"
    assert stats.tiers["nvme"].slot_bytes <= 0.3 * stats.tiers["dram"].slot_bytes + 4096
    again = get(client)  # promoted by now: the same numbers once more
    assert all((a == b).all() for a, b in zip(found, again, strict=True))


def test_without_compression_the_disk_gives_the_bytes_themselves(kvd: KvdProcess) -> None:
    client = start(kvd, "none")
    put(client)
    kvd.stop()
    found = get(start(kvd, "none"))
    assert all((b == payload_of(k)).all() for k, b in zip(KEYS, found, strict=True))


@pytest.mark.parametrize(("before", "after"), [("int8", "fp8"), ("none", "int8"), ("fp8", "none")])
def test_blocks_packed_otherwise_are_not_read_after_a_change_of_the_setting(
    kvd: KvdProcess, before: str, after: str
) -> None:
    put(start(kvd, before))
    kvd.stop()
    client = start(kvd, after)
    assert client.find(KEYS) == 0
    put(client)
    assert len(get(client)) == len(KEYS)


def test_a_damaged_packed_block_is_a_miss(kvd: KvdProcess) -> None:
    put(start(kvd, "int8"))
    kvd.stop()
    data = bytearray(kvd.slab_path.read_bytes())
    data[4096 + 100] ^= 1  # in the first slot's payload
    kvd.slab_path.write_bytes(data)
    client = start(kvd, "int8")
    found = sum(len(get_one(client, key)) for key in KEYS)
    assert found == len(KEYS) - 1
    assert client.stats().tiers["nvme"].num_checksum_failures == 1


def get_one(client: KvdClient, key: bytes) -> list[float]:
    lease = client.acquire([key])
    into = np.empty(LAYOUT.block_bytes, dtype=np.uint8)
    errors = [off_by(key, into) for i, _ in enumerate(lease.blocks) if client.load(lease, i, into)]
    client.release(lease)
    assert all(error < 0.015 for error in errors)
    return errors


def test_holders_of_another_layout_of_the_same_size_are_refused(kvd: KvdProcess) -> None:
    start(kvd, "int8")
    other = BlockLayout(2, 16, 4, 20, "float32")
    assert other.block_bytes == LAYOUT.block_bytes
    with pytest.raises(LayoutNotPacked, match="packs blocks of"):
        kvd.client(block_bytes=other.block_bytes, namespace=f"{other.describe()}.0123456789abcdef")


def test_a_holder_that_does_not_say_its_layout_settles_nothing_for_those_who_do(
    kvd: KvdProcess, eventually: Eventually
) -> None:
    kvd.start(nvme_bytes=1 << 20, nvme_compression="int8")
    kvd.client(block_bytes=LAYOUT.block_bytes).close()
    with KvdOperator(kvd.socket_path, "test") as operator:
        eventually(lambda: operator.stats().num_holders == 0)
    client = kvd.client(block_bytes=LAYOUT.block_bytes, namespace=NAMESPACE)
    assert client.stats().tiers["nvme"].form == "int8.v1"


def test_a_block_with_an_infinity_goes_no_further_than_dram(
    kvd: KvdProcess, eventually: Eventually
) -> None:
    client = start(kvd, "int8", num_dram_slots=4)
    payload = payload_of(KEYS[0]).view(np.float32).copy()
    payload[3] = np.inf
    (reservation,) = client.reserve(KEYS[:1])
    assert reservation is not None
    client.write(reservation, payload.view(np.uint8), LAYOUT.block_tokens)
    assert client.commit([reservation]) == 1
    for key in KEYS[1:]:
        for other in filter(None, client.reserve([key])):
            client.write(other, payload_of(key), LAYOUT.block_tokens)
            client.commit([other])
    eventually(lambda: client.find(KEYS[:1]) == 0)
    assert client.stats().tiers["dram"].num_checksum_failures == 0


def test_nodes_that_compress_differently_do_not_lend_to_each_other(
    kvds: tuple[KvdProcess, KvdProcess], eventually: Eventually
) -> None:
    lender, borrower = kvds
    put(start(lender, "int8", peer_port=0))
    client = start(borrower, "none")
    assert client.pull(KEYS, [lender.peer_address], wait_s=5).num_blocks == 0
    eventually(lambda: bool(borrower.find_events("peer_failed")))
    (failure,) = borrower.find_events("peer_failed")
    assert f"{NAMESPACE}+int8.v1" in failure["reason"]
    assert f"{NAMESPACE})" in failure["reason"]
    borrower.stop()
    alike = start(borrower, "int8")
    assert alike.pull(KEYS, [lender.peer_address], wait_s=5).num_blocks == len(KEYS)
