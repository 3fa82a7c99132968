"""The mover alone, against a real cache daemon."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiering.block_layout import BlockLayout
from tiering.kvd.client import KvdClient
from workers.hbm_pool import ByteArray, HostPool
from workers.kv_jobs import LoadJob, NoCache, NoTierBelow, StoreJob
from workers.kv_mover import KvdMover
from workers.sequence import Sequence

BLOCK_BYTES = 512
LIMIT_S = 30.0
MakeSequence = Callable[..., Sequence]


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Bench:
    """Movers over one pool, and the jobs that they delivered."""

    def __init__(self) -> None:
        self.hbm = HostPool(64, BLOCK_BYTES)
        self.pool: ByteArray = self.hbm.blocks
        self.delivered: list[LoadJob | StoreJob] = []
        self.movers: list[KvdMover] = []
        self.on_delivery: Callable[[], None] = lambda: None
        self._changed = threading.Condition()

    def start(self, mover: KvdMover) -> KvdMover:
        mover.start(self.hbm, 16, self._deliver)
        self.movers.append(mover)
        return mover

    def wait(self, *jobs: LoadJob | StoreJob) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: all(job in self.delivered for job in jobs), LIMIT_S
            )

    def fill(self, *block_ids: int) -> None:
        for block_id in block_ids:
            self.pool[block_id] = block_id + 1

    def _deliver(self, job: LoadJob | StoreJob) -> None:
        with self._changed:
            self.delivered.append(job)
            self._changed.notify_all()
        self.on_delivery()


@pytest.fixture
def bench() -> Iterator[Bench]:
    built = Bench()
    yield built
    for mover in built.movers:
        mover.stop()


def load(sequence: Sequence, keys: list[bytes], block_ids: list[int], **fields: Any) -> LoadJob:
    return LoadJob(sequence=sequence, keys=keys, block_ids=block_ids, **fields)


def test_stored_blocks_come_back_byte_for_byte(
    bench: Bench, kvd: Any, sequence: MakeSequence
) -> None:
    mover = bench.start(kvd.mover())
    bench.fill(0, 1, 2)
    stored = StoreJob(keys=[key(0), key(1), key(2)], block_ids=[0, 1, 2])
    assert mover.store(stored)
    bench.wait(stored)
    loaded = load(sequence("r", [1]), stored.keys, [10, 11, 12])
    mover.load(loaded)
    bench.wait(loaded)
    assert loaded.num_loaded == 3
    assert np.array_equal(bench.pool[10:13], bench.pool[0:3])
    assert (mover.stats().num_loaded_blocks, mover.stats().num_stored_blocks) == (3, 3)
    assert mover.stats().num_pending_blocks == 0


def test_only_the_head_run_is_loaded(bench: Bench, kvd: Any, sequence: MakeSequence) -> None:
    mover = bench.start(kvd.mover())
    bench.fill(0, 2)
    mover.store(StoreJob(keys=[key(0), key(2)], block_ids=[0, 2]))
    loaded = load(sequence("r", [1]), [key(0), key(1), key(2)], [10, 11, 12])
    bench.wait(*bench.delivered)
    again = StoreJob(keys=[], block_ids=[], sequence=sequence("fence", [1]))
    mover.store(again)
    bench.wait(again)
    mover.load(loaded)
    bench.wait(loaded)
    assert loaded.num_loaded <= 1
    assert not bench.pool[11:13].any()


def test_a_tail_is_loaded_once_and_only_behind_a_whole_run(
    bench: Bench, kvd: Any, sequence: MakeSequence
) -> None:
    mover = bench.start(kvd.mover())
    bench.fill(0, 1)
    done = sequence("r", [1])
    stored = StoreJob(
        keys=[key(0)], block_ids=[0, 1], sequence=done, tail_key=key(9), num_tail_tokens=5
    )
    assert mover.store(stored)
    broken = load(done, [key(0), key(7)], [10, 11, 12], tail_key=key(9))
    whole = load(done, [key(0)], [10, 11], tail_key=key(9))
    second = load(done, [key(0)], [20, 21], tail_key=key(9))
    bench.wait(stored)
    for job in (broken, whole, second):
        mover.load(job)
    bench.wait(broken, whole, second)
    assert (broken.num_loaded, broken.num_tail_tokens) == (1, 0)
    assert (whole.num_loaded, whole.num_tail_tokens) == (1, 5)
    assert np.array_equal(bench.pool[11], bench.pool[1])
    assert (second.num_loaded, second.num_tail_tokens) == (1, 0)


def test_loads_go_before_hand_overs_and_those_before_write_through(
    bench: Bench, kvd: Any, sequence: MakeSequence
) -> None:
    mover = bench.start(kvd.mover())
    is_free, has_begun = threading.Event(), threading.Event()

    def hold_first() -> None:
        has_begun.set()
        assert is_free.wait(LIMIT_S)

    bench.on_delivery = hold_first
    mover.load(load(sequence("first", [1]), [key(0)], [0]))
    assert has_begun.wait(LIMIT_S)
    through = StoreJob(keys=[key(1)], block_ids=[1])
    handed = StoreJob(keys=[key(2)], block_ids=[2], sequence=sequence("second", [1]))
    loaded = load(sequence("third", [1]), [key(3)], [3])
    mover.store(through)
    mover.store(handed)
    mover.load(loaded)
    is_free.set()
    bench.wait(through, handed, loaded)
    assert bench.delivered[1:] == [loaded, handed, through]


def test_an_abandoned_job_moves_nothing_and_is_answered(
    bench: Bench, kvd: Any, sequence: MakeSequence
) -> None:
    mover = bench.start(kvd.mover())
    one = sequence("r", [1])
    handed = StoreJob(keys=[key(1)], block_ids=[1], sequence=one, is_abandoned=True)
    loaded = load(one, [key(1)], [3], is_abandoned=True)
    mover.store(handed)
    bench.wait(handed)
    mover.load(loaded)
    bench.wait(loaded)
    assert (handed.num_stored, loaded.num_loaded) == (0, 0)


def test_what_waits_for_write_through_is_bounded(
    bench: Bench, kvd: Any, sequence: MakeSequence
) -> None:
    mover = bench.start(kvd.mover(max_pending_blocks=2))
    is_free, has_begun = threading.Event(), threading.Event()

    def hold_first() -> None:
        has_begun.set()
        assert is_free.wait(LIMIT_S)

    bench.on_delivery = hold_first
    mover.load(load(sequence("first", [1]), [key(0)], [0]))
    assert has_begun.wait(LIMIT_S)
    taken = [mover.store(StoreJob(keys=[key(n)], block_ids=[n])) for n in range(4)]
    is_free.set()
    assert taken == [True, True, False, False]
    assert mover.stats().num_dropped_blocks == 2


def test_a_daemon_that_never_was_makes_every_load_a_miss(
    bench: Bench, tmp_path: Path, sequence: MakeSequence
) -> None:
    mover = bench.start(
        KvdMover(
            lambda: KvdClient(tmp_path / "nobody.sock", BLOCK_BYTES, "test"),
            max_pending_blocks=8,
        )
    )
    stored = StoreJob(keys=[key(1)], block_ids=[1])
    loaded = load(sequence("r", [1]), [key(1)], [3])
    assert mover.store(stored)
    mover.load(loaded)
    bench.wait(stored, loaded)
    assert loaded.num_loaded == 0
    assert not mover.stats().is_connected


def test_a_daemon_with_another_block_size_makes_every_load_a_miss(
    bench: Bench, kvd: Any, sequence: MakeSequence
) -> None:
    owner = kvd.client("owner")
    owner.connect()
    owner.commit([])
    mover = bench.start(
        KvdMover(lambda: KvdClient(kvd.socket_path, 2 * BLOCK_BYTES, "test"), max_pending_blocks=8)
    )
    loaded = load(sequence("r", [1]), [key(1)], [3])
    mover.load(loaded)
    bench.wait(loaded)
    owner.close()
    assert loaded.num_loaded == 0
    assert not mover.stats().is_connected


def test_a_daemon_that_packs_blocks_of_another_layout_is_not_asked_again_at_once(
    bench: Bench, kvd: Any, sequence: MakeSequence
) -> None:
    kvd.end()
    kvd.env["POINTSMAN_KVD_NVME_COMPRESSION"] = "int8"
    kvd.start()
    served, other = (BlockLayout(2, 16, heads, 2 // heads, "float32") for heads in (1, 2))
    names = [f"{layout.describe()}.0123456789abcdef" for layout in (served, other)]
    owner = KvdClient(kvd.socket_path, BLOCK_BYTES, "owner", namespace=names[0])
    owner.connect()
    mover = bench.start(
        KvdMover(
            lambda: KvdClient(kvd.socket_path, BLOCK_BYTES, "test", namespace=names[1]),
            max_pending_blocks=8,
        )
    )
    loaded = load(sequence("r", [1]), [key(1)], [3])
    mover.load(loaded)
    bench.wait(loaded)
    owner.close()
    assert loaded.num_loaded == 0
    assert mover.stats().num_unavailable == 0, "it would be asked again within 2 s"


def test_a_mover_that_stops_answers_all_it_took(
    bench: Bench, kvd: Any, sequence: MakeSequence
) -> None:
    mover = bench.start(kvd.mover())
    jobs: list[LoadJob | StoreJob] = []
    for number in range(20):
        job = StoreJob(keys=[key(number)], block_ids=[number])
        assert mover.store(job)
        jobs.append(job)
    last = load(sequence("r", [1]), [key(50)], [50])
    mover.load(last)
    mover.stop()
    assert set(bench.delivered) == {*jobs, last}
    assert mover.stats().num_stored_blocks == 20


def test_without_a_tier_nothing_is_taken(sequence: MakeSequence) -> None:
    mover = NoCache()
    assert not mover.is_enabled
    assert not mover.store(StoreJob(keys=[key(1)], block_ids=[1]))
    with pytest.raises(NoTierBelow):
        mover.load(load(sequence("r", [1]), [key(1)], [0]))
