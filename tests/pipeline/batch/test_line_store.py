"""One result per line, counted once, whoever writes it and how often."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pipeline.batch.batch_store import BatchEnd
from pipeline.batch.line_store import LineResult
from pipeline.batch.records import BatchStatus
from pipeline.protocol.stream import RequestUsage

NOW_S = 1_000_000


def result(batch: Any, line: int, *, is_success: bool = True, output: bytes = b"{}") -> LineResult:
    return LineResult(batch.number, line, is_success, output, RequestUsage(2, 3, 1))


def counts(shelf: Any, batch: Any) -> tuple[int, int, int]:
    found = shelf.batches.load(batch.number)
    return found.num_completed, found.num_failed, found.output_tokens


@pytest.fixture
def batch(shelf: Any, make_input: Callable[[int], bytes]) -> Any:
    return shelf.accepted(make_input(5))


def test_pending_lines_are_those_without_a_result(shelf: Any, batch: Any) -> None:
    shelf.lines.add_results([result(batch, 2), result(batch, 4)])
    pending = shelf.lines.pending(batch.number, after_line=0, limit=10)
    assert [(place.line, place.custom_id) for place in pending] == [(1, "r0"), (3, "r2"), (5, "r4")]
    more = shelf.lines.pending(batch.number, after_line=1, limit=1)
    assert [place.line for place in more] == [3]


def test_a_result_that_comes_twice_counts_once_and_the_first_stays(shelf: Any, batch: Any) -> None:
    assert shelf.lines.add_results([result(batch, 1, output=b"first")]) == 1
    again = [result(batch, 1, is_success=False, output=b"second"), result(batch, 2)]
    assert shelf.lines.add_results(again) == 1
    assert counts(shelf, batch) == (2, 0, 6)
    assert next(shelf.lines.ended(batch.number)).output == b"first"


def test_writers_at_once_keep_one_result_per_line(shelf: Any, batch: Any) -> None:
    results = [result(batch, line, is_success=line != 3) for line in range(1, 6)]
    with ThreadPoolExecutor(6) as pool:
        added = [pool.submit(shelf.lines.add_results, results) for _ in range(6)]
    assert sum(done.result() for done in added) == 5
    assert counts(shelf, batch) == (4, 1, 15)


def test_ended_tells_what_became_of_every_line(shelf: Any, batch: Any) -> None:
    shelf.lines.add_results([result(batch, 2), result(batch, 5, is_success=False)])
    ended = [(item.line, item.is_success, item.output) for item in shelf.lines.ended(batch.number)]
    assert ended == [
        (1, False, None),
        (2, True, b"{}"),
        (3, False, None),
        (4, False, None),
        (5, False, b"{}"),
    ]


def test_a_batch_that_is_over_takes_no_result_and_keeps_no_rows(shelf: Any, batch: Any) -> None:
    end = BatchEnd(BatchStatus.EXPIRED, num_completed=1, num_failed=4)
    shelf.lines.add_results([result(batch, 1)])
    assert shelf.batches.finish(batch, end, NOW_S)
    assert shelf.lines.add_results([result(batch, 2)]) == 0
    shelf.lines.purge_ended()
    assert list(shelf.lines.ended(batch.number)) == []
    assert shelf.lines.add_results([result(batch, 2)]) == 0
    assert counts(shelf, batch)[:2] == (1, 4)


def test_lines_are_cleared_in_the_named_statuses_only(shelf: Any, batch: Any) -> None:
    shelf.lines.clear(batch.number, (BatchStatus.VALIDATING,))
    assert len(list(shelf.lines.ended(batch.number))) == 5
    shelf.lines.purge_ended()
    assert len(list(shelf.lines.ended(batch.number))) == 5
