"""What other projects got wrong with promises and memory (notes on faults 17, 20, 22, 28, 29)."""

from __future__ import annotations

import contextlib
import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.tiering.kvd.test_peers import BIG_BYTES, Gate, check, keys_of, nothing_held, put
from tiering.block_directory import BlockDirectory
from tiering.block_stamp import BlockStamp
from tiering.errors import KvdUnavailable
from tiering.eviction.arc import ArcEvictor
from tiering.lease import BlockLease
from tiering.stores.dram_slab import DramSlab

if TYPE_CHECKING:
    from conftest import KvdProcess

LIMIT_S = 20.0
Pair = tuple["KvdProcess", "KvdProcess"]
Eventually = Callable[[Callable[[], bool]], None]


def test_a_holder_that_leaves_in_the_middle_of_a_pull_leaves_its_slots_to_the_transport(
    kvds: Pair, eventually: Eventually
) -> None:
    """The slots must not be given to anybody else while bytes of the peer still land in them."""
    ours, theirs = kvds
    num_blocks = 24
    ours.start(
        dram_bytes=(num_blocks + 8) * BIG_BYTES,
        high_watermark=1.0,
        low_watermark=0.9,
        peer_stall_s=30,
    )
    theirs.start(dram_bytes=2 * num_blocks * BIG_BYTES, peer_port=0, peer_stall_s=30)
    source = theirs.client(block_bytes=BIG_BYTES)
    watcher = ours.client("watcher", block_bytes=BIG_BYTES)
    leaver = ours.client("leaver", block_bytes=BIG_BYTES)
    keys, others = keys_of(range(12)), keys_of(range(100, 100 + num_blocks + 8))
    assert put(source, keys, BIG_BYTES) == 12
    in_the_middle, may_go_on = threading.Event(), threading.Event()

    def hold(data: bytes) -> bytes:
        in_the_middle.set()
        assert may_go_on.wait(LIMIT_S)
        return data

    gate = Gate(theirs.peer_address, 6 * BIG_BYTES, hold)

    def pull() -> None:
        with contextlib.suppress(KvdUnavailable, OSError):  # its connection is closed under it
            leaver.pull(keys, [gate.address], wait_s=LIMIT_S)

    thread = threading.Thread(target=pull)
    thread.start()
    assert in_the_middle.wait(LIMIT_S)
    raw = leaver._connection._socket
    assert raw is not None
    raw.shutdown(2)
    thread.join(LIMIT_S)
    eventually(lambda: watcher.stats().num_holders == 1)
    for key in others:  # fills and evicts every slot that may be had
        put(watcher, [key], BIG_BYTES)
    may_go_on.set()
    eventually(lambda: nothing_held(watcher))
    gate.close()
    for key in [*keys, *others]:
        assert check(watcher, [key], BIG_BYTES) in (0, 1)  # and every byte is right
    assert watcher.stats().tiers["dram"].num_checksum_failures == 0


def test_a_node_that_dies_in_the_middle_of_a_pull_holds_nothing_at_the_one_that_lent(
    kvds: Pair, eventually: Eventually
) -> None:
    """Blocks lent to the dead would never be evicted again (vllm#46283)."""
    ours, theirs = kvds
    num_blocks = 24
    ours.start(dram_bytes=2 * num_blocks * BIG_BYTES, peer_stall_s=30)
    theirs.start(dram_bytes=2 * num_blocks * BIG_BYTES, peer_port=0, peer_stall_s=30)
    source, asker = theirs.client(block_bytes=BIG_BYTES), ours.client(block_bytes=BIG_BYTES)
    assert put(source, keys_of(range(num_blocks)), BIG_BYTES) == num_blocks

    def die(data: bytes) -> bytes:
        assert source.stats().num_leases == 1
        ours.kill()
        gate.close()
        return data

    gate = Gate(theirs.peer_address, 4 * BIG_BYTES, die)
    with contextlib.suppress(KvdUnavailable):
        asker.pull(keys_of(range(num_blocks)), [gate.address], wait_s=LIMIT_S)
    eventually(lambda: source.stats().num_leases == 0)
    source.discard(keys_of(range(num_blocks)))
    assert source.stats().tiers["dram"].slots_by_state["ready"] == 0


class SlowSlab(DramSlab):
    """The slab of a holder that gets no core between its copy and the look at the clock."""

    def copy_out(self, *copy: Any) -> None:
        super().copy_out(*copy)
        self.until()

    until: Callable[[], None] = staticmethod(lambda: None)


def test_a_copy_that_outlives_its_lease_is_not_believed(
    kvd: KvdProcess, eventually: Eventually
) -> None:
    """Its last bytes may be those of whoever has the slot now (Mooncake#850)."""
    kvd.start(dram_bytes=8 * BIG_BYTES)
    client, watcher = kvd.client(block_bytes=BIG_BYTES), kvd.client("w", block_bytes=BIG_BYTES)
    keys = keys_of(range(1))
    put(client, keys, BIG_BYTES)
    assert client._slab is not None
    slow = client._slab = SlowSlab(client._slab._memory, BIG_BYTES)
    into = np.empty(BIG_BYTES, dtype=np.uint8)

    def load(lease: BlockLease) -> bool:
        return client.load(lease, 0, into)

    assert load(client.acquire(keys, ttl_s=LIMIT_S))
    slow.until = lambda: eventually(lambda: watcher.stats().num_leases == 1)
    assert not load(client.acquire(keys, ttl_s=0.3))


def test_the_index_of_a_tier_takes_less_than_a_kibibyte_a_block() -> None:
    num_blocks = 20_000
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        directory = BlockDirectory(num_blocks, ArcEvictor)
        for number in range(num_blocks):
            key = number.to_bytes(16, "big")
            block = directory.reserve(key, 1, deadline_s=None)
            assert block is not None
            directory.publish(block, BlockStamp(key, block.generation, 16, 4096, number), 0.0)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / num_blocks < 1024


def shared_memory_of(pid: int) -> dict[str, int]:
    """Mapped bytes by name of what a process shares through memory."""
    found: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) > 5 and ("memfd:" in fields[5] or "/dev/shm" in fields[5]):  # noqa: S108
            first, last = (int(part, 16) for part in fields[0].split("-"))
            found[fields[5]] = found.get(fields[5], 0) + last - first
    return found


def test_the_slab_is_as_large_as_was_said_and_has_no_name_that_could_be_left_behind(
    kvd: KvdProcess,
) -> None:
    wanted_bytes = 7 * BIG_BYTES + 1
    kvd.start(dram_bytes=wanted_bytes)
    ((name, num_bytes),) = shared_memory_of(kvd.pid).items()
    assert name.startswith("/memfd:")
    assert wanted_bytes <= num_bytes < wanted_bytes + 4096
    client = kvd.client(block_bytes=BIG_BYTES)
    assert put(client, keys_of(range(3)), BIG_BYTES) == 3
    assert shared_memory_of(os.getpid())[name] == num_bytes
    lease = client.acquire(keys_of(range(1)))
    kvd.kill()
    into = np.empty(BIG_BYTES, dtype=np.uint8)
    assert client.load(lease, 0, into)  # mapped memory outlives the daemon, for its holders only
    client.close()
    assert name not in shared_memory_of(os.getpid())
