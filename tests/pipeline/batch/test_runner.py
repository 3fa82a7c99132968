"""A whole batch against a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.batch.errors import BatchFileInvalid, GatewayGone, GatewayRefuses
from pipeline.batch.runner import BatchJob, BatchRunner
from pipeline.batch.tally import Tally

MakeLine = Callable[..., str]


def job(tmp_path: Path, lines: list[str], url: str, **options: Any) -> BatchJob:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines))
    return BatchJob(input_path=path, output_path=tmp_path / "out.jsonl", url=url, **options)


async def run(job: BatchJob, stop_after: int | None = None) -> Tally:
    stop = asyncio.Event()

    def look(tally: Tally) -> None:
        if stop_after is not None and tally.num_done >= stop_after:
            stop.set()

    return await BatchRunner(job, look).run(stop)


def results(path: Path) -> dict[str, Any]:
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    by_id = {entry["custom_id"]: entry["response"] for entry in entries}
    assert len(by_id) == len(entries), "a request has two lines"
    return by_id


def error(status: int, code: str, **headers: str) -> tuple[int, dict[str, str], Any]:
    body = {"message": code, "type": "server_error", "param": None, "code": code}
    return status, headers, {"error": body}


async def test_every_request_gets_its_own_answer_at_batch_priority(
    tmp_path: Path, small_gateway: Any, make_line: MakeLine
) -> None:
    lines = [make_line(f"id-{i}", temperature=0) for i in range(50)]
    tally = await run(job(tmp_path, lines, small_gateway.url, window=8, api_key="secret"))
    assert (tally.num_done, tally.num_failed, tally.num_tokens) == (50, 0, 150)
    for custom_id, response in results(tmp_path / "out.jsonl").items():
        assert response["body"]["choices"][0]["message"]["content"] == custom_id
        assert response["request_id"] == f"req-{custom_id}"
    assert all(
        body["priority"] == "batch" and body["temperature"] == 0 for body in small_gateway.bodies
    )
    assert small_gateway.headers[0]["Authorization"] == "Bearer secret"


async def test_never_more_than_the_window_is_in_flight(
    tmp_path: Path, small_gateway: Any, make_line: MakeLine
) -> None:
    small_gateway.delay_s = 0.02
    await run(job(tmp_path, [make_line(f"{i}") for i in range(40)], small_gateway.url, window=4))
    assert small_gateway.max_in_flight == 4


async def test_a_stopped_batch_goes_on_without_repeating_finished_lines(
    tmp_path: Path, small_gateway: Any, make_line: MakeLine
) -> None:
    small_gateway.delay_s = 0.01
    task = job(tmp_path, [make_line(f"{i}") for i in range(60)], small_gateway.url, window=4)
    first = await run(task, stop_after=10)
    assert 10 <= first.num_done < 60
    num_asked = len(small_gateway.bodies)
    second = await run(task)
    assert second.num_skipped == first.num_done
    assert second.num_done == 60 - first.num_done
    assert len(small_gateway.bodies) - num_asked == second.num_done
    assert len(results(tmp_path / "out.jsonl")) == 60


async def test_a_refused_request_is_a_line_with_the_error_and_the_rest_goes_on(
    tmp_path: Path, small_gateway: Any, make_line: MakeLine
) -> None:
    normal = small_gateway.rule
    small_gateway.rule = lambda body, n: (
        error(400, "context_length_exceeded")
        if body["messages"][0]["content"] == "long"
        else normal(body, n)
    )
    lines = [make_line("a"), make_line("long"), make_line("b")]
    tally = await run(job(tmp_path, lines, small_gateway.url))
    assert (tally.num_done, tally.num_failed) == (2, 1)
    refused = results(tmp_path / "out.jsonl")["long"]
    assert refused["status_code"] == 400
    assert refused["body"]["error"]["code"] == "context_length_exceeded"


async def test_errors_go_to_their_own_file_when_asked_and_are_not_repeated(
    tmp_path: Path, small_gateway: Any, make_line: MakeLine
) -> None:
    small_gateway.rule = lambda _body, _n: error(400, "invalid_value")
    task = job(tmp_path, [make_line("a")], small_gateway.url, errors_path=tmp_path / "err.jsonl")
    await run(task)
    assert (tmp_path / "out.jsonl").read_text() == ""
    assert set(results(tmp_path / "err.jsonl")) == {"a"}
    assert (await run(task)).num_skipped == 1
    assert len(small_gateway.bodies) == 1


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (429, "rate_limit_exceeded"),
        (503, "overloaded"),
        (504, "queue_timeout"),
        (500, "internal_error"),
    ],
)
async def test_a_busy_gateway_is_asked_again_after_the_time_it_names(
    tmp_path: Path, small_gateway: Any, make_line: MakeLine, status: int, code: str
) -> None:
    normal = small_gateway.rule
    retry_after = {"Retry-After": "0.2"}
    small_gateway.rule = lambda body, n: (
        error(status, code, **retry_after) if n < 2 else normal(body, n)
    )
    began_s = time.monotonic()
    tally = await run(job(tmp_path, [make_line("a")], small_gateway.url))
    assert (tally.num_done, len(small_gateway.bodies)) == (1, 3)
    assert time.monotonic() - began_s >= 0.4


async def test_a_request_that_always_breaks_the_server_is_given_up_and_written(
    tmp_path: Path, small_gateway: Any, make_line: MakeLine
) -> None:
    small_gateway.rule = lambda _body, _n: error(500, "worker_lost", **{"Retry-After": "0"})
    tally = await run(job(tmp_path, [make_line("a")], small_gateway.url))
    assert (tally.num_failed, len(small_gateway.bodies)) == (1, 3)
    assert results(tmp_path / "out.jsonl")["a"]["status_code"] == 500


async def test_a_failure_that_says_do_not_retry_is_not_retried(
    tmp_path: Path, small_gateway: Any, make_line: MakeLine
) -> None:
    small_gateway.rule = lambda _body, _n: error(
        429, "insufficient_quota", **{"x-should-retry": "false"}
    )
    assert (await run(job(tmp_path, [make_line("a")], small_gateway.url))).num_failed == 1
    assert len(small_gateway.bodies) == 1


async def test_a_refused_key_ends_the_batch_and_writes_no_line(
    tmp_path: Path, small_gateway: Any, make_line: MakeLine
) -> None:
    small_gateway.rule = lambda _body, _n: error(401, "invalid_api_key")
    with pytest.raises(GatewayRefuses, match="401: invalid_api_key"):
        await run(job(tmp_path, [make_line("a"), make_line("b")], small_gateway.url))
    assert (tmp_path / "out.jsonl").read_text() == ""


async def test_a_gateway_that_restarts_is_waited_for(
    tmp_path: Path, small_gateway: Any, make_line: MakeLine
) -> None:
    port = small_gateway.server.server_port
    url = small_gateway.url
    small_gateway.close()
    started: list[Any] = []
    timer = threading.Timer(0.7, lambda: started.append(type(small_gateway)(port)))
    timer.start()
    try:
        tally = await run(job(tmp_path, [make_line("a")], url))
        assert tally.num_done == 1
    finally:
        timer.join()
        started[0].close()
        small_gateway.close = lambda: None


async def test_a_gateway_that_stays_away_ends_the_batch_after_the_patience(
    tmp_path: Path, make_line: MakeLine
) -> None:
    task = job(tmp_path, [make_line("a")], "http://127.0.0.1:9", patience_s=0.2)
    with pytest.raises(GatewayGone, match="was away"):
        await run(task)


async def test_nothing_is_sent_when_a_late_line_is_broken(
    tmp_path: Path, small_gateway: Any, make_line: MakeLine
) -> None:
    lines = [make_line(f"{i}") for i in range(200)] + ["{broken"]
    with pytest.raises(BatchFileInvalid, match="line 201"):
        BatchRunner(job(tmp_path, lines, small_gateway.url), lambda _tally: None)
    assert small_gateway.bodies == []
    assert not (tmp_path / "out.jsonl").exists()
