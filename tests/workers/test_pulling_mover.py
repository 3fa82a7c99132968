"""Blocks that another node's cache daemon has, through two real daemons."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pipeline.protocol.cache_use import LoadReason
from pipeline.scheduling.link_report import LinkReport
from pipeline.scheduling.transfer_cost import LoadPolicy
from tiering.kvd.stats import LendingStats
from workers.hbm_pool import HostPool
from workers.kv_jobs import LoadJob, StoreJob
from workers.pulling_mover import PullingMover
from workers.sequence import Peer, Sequence

if TYPE_CHECKING:
    from conftest import Kvd

BLOCK_BYTES = 512
NUM_BLOCKS = 20
LIMIT_S = 30.0
KEYS = [number.to_bytes(16, "big") for number in range(NUM_BLOCKS)]
MakeSequence = Callable[..., Sequence]


@dataclass
class Node:
    """A daemon, a pool, and what was delivered."""

    kvd: Kvd
    pool: HostPool
    delivered: list[LoadJob | StoreJob]
    changed: threading.Condition

    def start(self, mover: Any) -> Any:
        mover.start(self.pool, 16, self._deliver)
        return mover

    def wait(self, job: LoadJob | StoreJob) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: job in self.delivered, LIMIT_S)

    def lending(self) -> LendingStats:
        client = self.kvd.client("looks")
        client.connect()
        try:
            return client.stats().lending
        finally:
            client.close()

    def _deliver(self, job: LoadJob | StoreJob) -> None:
        with self.changed:
            self.delivered.append(job)
            self.changed.notify_all()


def node(kvd: Kvd) -> Node:
    return Node(kvd, HostPool(64, BLOCK_BYTES), [], threading.Condition())


@pytest.fixture
def here(kvd: Kvd) -> Node:
    return node(kvd)


@pytest.fixture
def there(kvd: Kvd, tmp_path: Path) -> Iterator[Node]:
    """A node that lends blocks 0 to 19, filled with their numbers."""
    env = {"POINTSMAN_KVD_PEER_PORT": "0", "POINTSMAN_KVD_PEER_STALL_S": "10"}
    daemon = type(kvd)(tmp_path / "there.sock", tmp_path / "there.slab", env=env)
    daemon.start()
    lender = node(daemon)
    mover = lender.start(daemon.mover())
    for number in range(NUM_BLOCKS):
        lender.pool.blocks[number] = number + 1
    stored = StoreJob(keys=KEYS, block_ids=list(range(NUM_BLOCKS)))
    assert mover.store(stored)
    lender.wait(stored)
    yield lender
    mover.stop()
    daemon.end()


@pytest.fixture
def pulling(here: Node) -> Iterator[Callable[[LoadPolicy], PullingMover]]:
    movers: list[PullingMover] = []

    def make(policy: LoadPolicy) -> PullingMover:
        inner = here.kvd.mover("inner")
        movers.append(here.start(PullingMover(inner, lambda: here.kvd.client("pulls"), policy)))
        return movers[-1]

    yield make
    for mover in movers:
        mover.stop()


def wanted(
    sequence: MakeSequence, peer: str, link: LinkReport | None = None, **fields: Any
) -> LoadJob:
    asking = sequence("r", [1], peers=(Peer("there", peer, link),))
    return LoadJob(asking, KEYS, list(range(30, 30 + NUM_BLOCKS)), **fields)


Pulling = Callable[[LoadPolicy], PullingMover]


def test_blocks_of_another_node_are_pulled_and_loaded_byte_for_byte(
    here: Node, there: Node, pulling: Pulling, sequence: MakeSequence
) -> None:
    mover = pulling(LoadPolicy.ALWAYS)
    job = wanted(sequence, there.lending().address)
    mover.load(job)
    here.wait(job)
    assert job.num_loaded == NUM_BLOCKS
    assert np.array_equal(here.pool.blocks[30:50], there.pool.blocks[:20])
    assert there.lending().num_blocks == NUM_BLOCKS
    assert (job.pull_reason, job.num_from_peer) == (LoadReason.ALWAYS, NUM_BLOCKS)
    assert job.peer is not None
    assert job.peer.node == "there"


def test_a_link_is_measured_with_a_few_blocks_and_left_alone_when_computing_is_faster(
    here: Node, there: Node, pulling: Pulling, sequence: MakeSequence
) -> None:
    mover = pulling(LoadPolicy.COST)
    job = wanted(sequence, there.lending().address, prefill_tokens_per_s=1e9)
    mover.load(job)
    here.wait(job)
    assert 0 < there.lending().num_blocks < NUM_BLOCKS
    assert job.pull_reason in (LoadReason.SLOW_LINK, LoadReason.TOO_SHORT)
    assert (job.num_found, job.num_from_peer) == (NUM_BLOCKS, job.num_loaded)
    assert job.estimated_s > job.compute_s > 0


def told_of(bytes_per_s: float) -> LinkReport:
    return LinkReport(
        source="there",
        target="here",
        round_trip_s=0.001,
        bytes_per_s=bytes_per_s,
        kind="wire",
        nominal_bytes_per_s=0.0,
        is_slow=False,
        by_block_bytes={},
        at_s=0.0,
    )


@pytest.mark.parametrize(("bytes_per_s", "num_pulled"), [(1e9, NUM_BLOCKS), (1.0, 0)])
def test_a_link_that_was_tested_is_trusted_from_the_first_pull(
    here: Node,
    there: Node,
    pulling: Pulling,
    sequence: MakeSequence,
    bytes_per_s: float,
    num_pulled: int,
) -> None:
    mover = pulling(LoadPolicy.COST)
    link = told_of(bytes_per_s)
    job = wanted(sequence, there.lending().address, link, prefill_tokens_per_s=1000.0)
    mover.load(job)
    here.wait(job)
    assert there.lending().num_blocks == num_pulled
    expected = LoadReason.FASTER if num_pulled else LoadReason.SLOW_LINK
    assert job.pull_reason is expected, "without a trial"


def test_a_link_that_is_faster_than_computing_brings_all(
    here: Node, there: Node, pulling: Pulling, sequence: MakeSequence
) -> None:
    mover = pulling(LoadPolicy.COST)
    job = wanted(sequence, there.lending().address, prefill_tokens_per_s=0.01)
    mover.load(job)
    here.wait(job)
    assert there.lending().num_blocks == NUM_BLOCKS


def test_nothing_is_pulled_where_loads_are_not_wanted(
    here: Node, there: Node, pulling: Pulling, sequence: MakeSequence
) -> None:
    mover = pulling(LoadPolicy.NEVER)
    job = wanted(sequence, there.lending().address)
    mover.load(job)
    here.wait(job)
    assert (job.num_loaded, there.lending().num_blocks) == (0, 0)
    assert (job.pull_reason, job.num_found) == (LoadReason.NEVER, NUM_BLOCKS)


def test_a_peer_that_is_gone_is_a_miss(
    here: Node, there: Node, pulling: Pulling, sequence: MakeSequence
) -> None:
    mover = pulling(LoadPolicy.ALWAYS)
    job = wanted(sequence, there.lending().address)
    there.kvd.kill()
    mover.load(job)
    here.wait(job)
    assert job.num_loaded == 0


def test_what_was_abandoned_is_answered_and_not_pulled(
    here: Node, there: Node, pulling: Pulling, sequence: MakeSequence
) -> None:
    mover = pulling(LoadPolicy.ALWAYS)
    job = wanted(sequence, there.lending().address, is_abandoned=True)
    mover.load(job)
    here.wait(job)
    assert there.lending().num_blocks == 0


def test_a_mover_that_stops_answers_all_it_took(
    here: Node, there: Node, sequence: MakeSequence
) -> None:
    inner = here.kvd.mover("inner")
    mover = here.start(PullingMover(inner, lambda: here.kvd.client("pulls"), LoadPolicy.ALWAYS))
    address = there.lending().address
    jobs = [wanted(sequence, address) for _ in range(5)]
    for job in jobs:
        mover.load(job)
    mover.stop()
    assert all(job in here.delivered for job in jobs)
