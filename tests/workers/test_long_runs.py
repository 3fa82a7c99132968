"""The window of a long run: what it may compute, when its blocks go, and when it is given up."""

from __future__ import annotations

from pipeline.protocol.sampling import SamplingParams
from tiering.block_hash import KeyChain, namespace_root
from workers.kv_jobs import NoCache, StoreJob
from workers.long_runs import LongRuns
from workers.sequence import Sequence
from workers.sequence_run import SequenceRun

ROOT = namespace_root({"test": "long runs"})


def new_run(num_computed: int = 0) -> SequenceRun:
    sequence = Sequence("r", 1, [7] * 1000, 1000, SamplingParams(max_tokens=100), ROOT)
    sequence.num_computed = num_computed
    return SequenceRun(sequence, 1, chain=KeyChain(ROOT))


def test_a_short_run_computes_as_much_as_it_likes() -> None:
    runs = LongRuns(16, 16, NoCache())
    assert runs.fit(new_run(), 500) == 500
    assert runs.num_to_cool(new_run(500), 0.0) == 0


def test_a_long_run_computes_no_more_than_its_window_holds() -> None:
    runs = LongRuns(16, 16, NoCache())
    run = new_run()
    runs.begin(run)
    assert runs.fit(run, 500) == 8 * 16
    run.sequence.num_computed = 100
    assert runs.fit(run, 500) == 28
    run.sequence.num_computed = 128
    assert runs.fit(run, 1) == 0
    runs.count_cooled(run, 5, 0.0)
    assert runs.fit(run, 500) == 5 * 16


def test_full_blocks_go_when_they_fill_half_the_window_and_one_move_at_a_time() -> None:
    runs = LongRuns(16, 16, NoCache())
    run = new_run(3 * 16 + 15)
    runs.begin(run)
    assert runs.num_to_cool(run, 0.0) == 0
    run.sequence.num_computed += 1
    assert runs.num_to_cool(run, 0.0) == 4
    run.job = StoreJob(keys=[], block_ids=[])
    assert runs.num_to_cool(run, 0.0) == 0


def test_a_move_that_gets_nowhere_is_tried_again_later_and_not_for_ever() -> None:
    runs = LongRuns(16, 16, NoCache())
    run = new_run(128)
    runs.begin(run)
    now_s = 100.0
    runs.count_cooled(run, 0, now_s)
    assert runs.num_to_cool(run, now_s) == 0
    num_tries = 1
    while not runs.is_hopeless(run):
        now_s += 0.25
        assert runs.num_to_cool(run, now_s) == 8
        runs.count_cooled(run, 0, now_s)
        num_tries += 1
    assert 20 < now_s - 100 < 60
    runs.count_cooled(run, 1, now_s)
    assert not runs.is_hopeless(run), "it gets on again"


def test_a_run_whose_blocks_are_lost_again_and_again_is_given_up() -> None:
    runs = LongRuns(16, 16, NoCache())
    run = new_run()
    run.num_losses = 8
    assert not runs.is_hopeless(run)
    run.num_losses = 9
    assert runs.is_hopeless(run)


def test_the_window_is_free_again_when_its_run_has_let_go() -> None:
    runs = LongRuns(16, 16, NoCache())
    run, other = new_run(), new_run()
    runs.begin(run)
    runs.end(other)
    assert runs.current is run
    runs.end(run)
    assert runs.current is None


def test_without_a_daemon_no_run_is_longer_than_the_pool() -> None:
    assert not LongRuns(16, 16, NoCache()).allows(new_run(), 17)
