"""Blocks that a holder reads where they lie, and how it knows afterwards that it read the right ones."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tiering.errors import KvdUnavailable
from tiering.kvd.client import KvdClient

if TYPE_CHECKING:
    from conftest import KvdProcess

BLOCK_BYTES = 10_000
KEYS = [bytes([number]) * 16 for number in range(1, 9)]
Eventually = Callable[[Callable[[], bool]], None]


def payload_of(key: bytes) -> np.ndarray:
    return np.full(BLOCK_BYTES, key[0], dtype=np.uint8)


def put(client: KvdClient) -> None:
    reserved = [each for each in client.reserve(KEYS) if each is not None]
    for each in reserved:
        client.write(each, payload_of(each.key), 16)
    assert client.commit(reserved) == len(KEYS)


def test_a_slab_mapped_again_shows_leased_blocks_in_their_slots(kvd: KvdProcess) -> None:
    kvd.start()
    client = kvd.client()
    put(client)
    slab = client.shared_slab
    assert slab is not None
    lease = client.acquire(KEYS)
    with mmap.mmap(slab.descriptor, slab.num_bytes, prot=mmap.PROT_READ) as memory:
        for index, block in enumerate(lease.blocks):
            assert client.verify(lease, index)
            start = block.slot * slab.slot_bytes
            assert memory[start : start + BLOCK_BYTES] == payload_of(block.key).tobytes()
    assert client.keeps(lease)
    client.close()
    assert client.shared_slab is None


def test_a_block_that_has_changed_is_found_out_and_dropped(kvd: KvdProcess) -> None:
    kvd.start()
    client = kvd.client()
    put(client)
    slab, lease = client.shared_slab, client.acquire(KEYS)
    assert slab is not None
    with mmap.mmap(slab.descriptor, slab.num_bytes) as memory:
        memory[lease.blocks[2].slot * slab.slot_bytes + 77] ^= 1
    assert [client.verify(lease, index) for index in range(4)] == [True, True, False, True]
    assert client.find(KEYS) == 2


def test_a_lease_that_ran_out_is_not_kept(kvd: KvdProcess, eventually: Eventually) -> None:
    kvd.start()
    client = kvd.client()
    put(client)
    lease = client.acquire(KEYS, ttl_s=0.05)
    eventually(lambda: not client.keeps(lease))
    assert not client.verify(lease, 0)


@pytest.mark.parametrize("ending", ["kill", "restart", "late", "close"])
def test_a_lease_is_kept_no_longer_than_its_connection(kvd: KvdProcess, ending: str) -> None:
    kvd.start()
    client = KvdClient(kvd.socket_path, BLOCK_BYTES, "holder", timeout_s=0.2)
    client.connect()
    put(client)
    lease = client.acquire(KEYS)
    assert client.keeps(lease)
    match ending:
        case "kill":
            kvd.kill()
        case "restart":
            kvd.kill()
            kvd.start()
            client.connect()
        case "late":
            os.kill(kvd.pid, signal.SIGSTOP)
            with pytest.raises(KvdUnavailable):
                client.find(KEYS)
            os.kill(kvd.pid, signal.SIGCONT)
        case _:
            client.close()
    assert not client.keeps(lease)
    client.close()


def test_asking_from_another_thread_while_answers_come_disturbs_nothing(kvd: KvdProcess) -> None:
    kvd.start()
    client = kvd.client()
    put(client)
    lease = client.acquire(KEYS)
    is_over = threading.Event()
    kept: list[bool] = []

    def ask() -> None:
        while not is_over.is_set():
            kept.append(client.keeps(lease))

    thread = threading.Thread(target=ask)
    thread.start()
    assert [client.find(KEYS) for _ in range(500)] == [len(KEYS)] * 500
    is_over.set()
    thread.join()
    assert kept
    assert all(kept), "an answer on its way is no hang-up"
