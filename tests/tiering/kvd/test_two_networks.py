"""Two daemons in network namespaces of their own, joined by a line of a known speed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.network_line import FAST_BITS, HERE, SLOW_BITS, THERE, Line, open_line
from tiering.kvd.client import KvdClient
from tiering.lease import PullResult
from tiering.stores.block_store import payload_checksum

if TYPE_CHECKING:
    from conftest import KvdProcess as Kvd

pytestmark = pytest.mark.slow

# SmolLM2-135M in bfloat16: 23,040 bytes a token, 16 tokens a block; 2,000 tokens.
BLOCK_BYTES = 16 * 23_040
NUM_BLOCKS = 125
PREFIX_BYTES = BLOCK_BYTES * NUM_BLOCKS
LIMIT_S = 40.0
SLACK_S = 5.0  # a busy machine's, not ours
SECRET = "of both ends of the line"  # noqa: S105 (of these tests alone)
KEYS = [number.to_bytes(16, "big") for number in range(NUM_BLOCKS)]
Eventually = Callable[[Callable[[], bool]], None]


@pytest.fixture
def line() -> Iterator[Line]:
    with open_line() as made:
        yield made


@dataclass
class Nodes:
    """A daemon at each end; `far` lends a prefix of 2,000 tokens, which `client` wants."""

    near: Kvd
    far: Kvd
    client: KvdClient
    sums: list[int]

    @property
    def peer(self) -> str:
        return self.far.peer_address

    def check(self) -> int:
        """Head run that is here, every block compared with what was written there."""
        lease = self.client.acquire(KEYS)
        into = np.empty(BLOCK_BYTES, dtype=np.uint8)
        for index in range(len(lease.blocks)):
            assert self.client.load(lease, index, into)
            assert payload_checksum(into) == self.sums[index]
        self.client.release(lease)
        return len(lease.blocks)


@pytest.fixture
def nodes(line: Line, tmp_path: Path, kvd: Kvd) -> Iterator[Nodes]:
    make = type(kvd)
    ends = []
    for space, address in ((line.near, HERE), (line.far, THERE)):
        folder = tmp_path / space
        folder.mkdir()
        end = make(folder, run_in=("ip", "netns", "exec", space))
        end.start(
            dram_bytes=2 * PREFIX_BYTES,
            peer_host=address,
            peer_port=0,
            peer_secret=SECRET,
            peer_stall_s=4,
        )
        ends.append(end)
    near, far = ends
    source = far.client(block_bytes=BLOCK_BYTES)
    rng = np.random.default_rng(5)
    sums = []
    for reservation in source.reserve(KEYS):
        assert reservation is not None
        payload = rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
        source.write(reservation, payload, 16)
        sums.append(payload_checksum(payload))
        assert source.commit([reservation]) == 1
    yield Nodes(near, far, near.client(block_bytes=BLOCK_BYTES), sums)
    for end in ends:
        end.close()


def test_on_a_fast_line_a_long_prefix_is_here_in_little_more_than_its_bytes_take(
    line: Line, nodes: Nodes
) -> None:
    line.shape(FAST_BITS)
    (offer,) = nodes.client.survey(KEYS, [nodes.peer], wait_s=LIMIT_S)
    assert offer.num_blocks == NUM_BLOCKS
    result = nodes.client.pull(KEYS, [nodes.peer], wait_s=LIMIT_S)
    assert result.num_blocks == NUM_BLOCKS
    assert nodes.check() == NUM_BLOCKS
    at_line_speed_s = PREFIX_BYTES * 8 / FAST_BITS
    assert at_line_speed_s * 0.8 < result.seconds < at_line_speed_s * 20


def test_on_a_slow_line_the_deadline_keeps_the_head_and_the_rate_is_known(
    line: Line, nodes: Nodes
) -> None:
    line.shape(SLOW_BITS)
    wait_s = 2.0
    began_s = time.monotonic()
    result = nodes.client.pull(KEYS, [nodes.peer], wait_s=wait_s)
    assert time.monotonic() - began_s < wait_s + SLACK_S
    assert 0 < result.num_found < NUM_BLOCKS / 2
    assert nodes.check() >= result.num_found
    limit_s = time.monotonic() + LIMIT_S
    while not (seen := nodes.client.stats().peers[nodes.peer]).num_pulls:
        assert time.monotonic() < limit_s
        time.sleep(0.02)
    assert 0.3 * SLOW_BITS < seen.moves.bytes_per_s * 8 < 1.3 * SLOW_BITS


def broken_in_the_middle(nodes: Nodes, breaks: Callable[[], object], wait_s: float) -> PullResult:
    """Begin a pull, break something once blocks arrive; the pull's result, checked."""
    results: list[PullResult] = []
    watcher = nodes.near.client("watcher", block_bytes=BLOCK_BYTES)
    began_s = time.monotonic()
    thread = threading.Thread(
        target=lambda: results.append(nodes.client.pull(KEYS, [nodes.peer], wait_s=wait_s))
    )
    thread.start()
    while not watcher.find(KEYS):
        assert time.monotonic() - began_s < LIMIT_S
    breaks()
    thread.join(LIMIT_S)
    assert time.monotonic() - began_s < wait_s + SLACK_S
    (result,) = results
    assert 0 < result.num_found < NUM_BLOCKS
    assert nodes.check() == result.num_found
    return result


@pytest.mark.parametrize("what", ["killed", "cut off"])
def test_a_peer_lost_in_the_middle_leaves_a_right_head_within_the_deadline(
    line: Line, nodes: Nodes, eventually: Eventually, what: str
) -> None:
    line.shape(SLOW_BITS)
    pid = nodes.far.pid

    def breaks() -> None:
        if what == "killed":
            os.kill(pid, signal.SIGKILL)
        else:
            line.cut()

    broken_in_the_middle(nodes, breaks, wait_s=8.0)
    states = nodes.client.stats().tiers["dram"].slots_by_state
    assert states["loading"] == 0
    assert nodes.client.stats().peers[nodes.peer].num_failures == 1
