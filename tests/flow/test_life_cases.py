"""Sections LIFE and OBS of the cases: clients that leave and come back, and what is left of them."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.flow.rig import Rig, wait_until
from tests.flow.talk import JobReading, Transcript, body, client, complete, stream, submit_job
from tests.flow.wire import (
    COMPLETIONS,
    assert_error,
    chat_body,
    connect,
    fresh_beats,
    num_tokens_run,
    post_bytes,
    reset,
    script,
    write_book,
)

STEP_MS = 20
NEIGHBOUR = [f"{number} " for number in range(300)]
COUNTED = [f"{number} " for number in range(40)]
BOOK = {
    "endless": script("on ", ends=False, token_delay_ms=STEP_MS),
    "neighbour": script(*NEIGHBOUR, token_delay_ms=STEP_MS),
    "counted": script(*COUNTED, token_delay_ms=STEP_MS),
    "slow-start": script("late", prefill_delay_ms=400, token_delay_ms=STEP_MS),
    "waits": script(*COUNTED, prefill_delay_ms=1000, token_delay_ms=STEP_MS),
}
RETENTION_S = 2
DRAIN_S = 5
GAUGES = ("pointsman_gateway_requests_running", "pointsman_gateway_requests_waiting")


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig], tmp_path_factory: pytest.TempPathFactory) -> Rig:
    book = write_book(tmp_path_factory.mktemp("life"), BOOK, context_tokens=4096)
    env = {
        "POINTSMAN_RETENTION_S": str(RETENTION_S),
        "POINTSMAN_GATEWAY_DRAIN_S": str(DRAIN_S),
    }
    return make_rig(engine="script", model=book, env=env)


def num_unacked(rig: Rig) -> int:
    """Messages that the broker keeps because nobody has said that they are done."""
    return sum(rig.redis.hlen(key) for key in rig.redis.scan_iter("unacked.*"))


def is_idle(rig: Rig) -> bool:
    """Gateway, ledger, broker and workers hold nothing."""
    return (
        all(rig.metric(name) == 0 for name in GAUGES)
        and rig.is_at_rest()
        and num_unacked(rig) == 0
        and not any(rig.redis.scard(key) for key in rig.redis.scan_iter("running:*"))
    )


def wait_idle(rig: Rig, limit_s: float = 3.0) -> None:
    """Wait until nothing is held; the workers' next words must say the same."""
    wait_until(lambda: is_idle(rig), limit_s, "idle")
    fresh_beats(rig)
    assert is_idle(rig)


def open_stream(rig: Rig, prompt: str, **fields: Any) -> socket.socket:
    """A connection over which a streamed completion has been asked for."""
    connection = connect(rig)
    connection.sendall(post_bytes(COMPLETIONS, body(prompt, stream=True, **fields)))
    return connection


def read_events(connection: socket.socket, count: int) -> None:
    """Wait for so many events."""
    data = b""
    while data.count(b"data: {") < count:
        part = connection.recv(65536)
        assert part, data
        data += part


async def test_c067_fifty_hard_disconnects_disturb_nobody_and_leave_nothing(rig: Rig) -> None:
    before = await asyncio.to_thread(num_tokens_run, rig)
    neighbours = [Transcript() for _ in range(3)]
    async with client(rig) as http:
        running = [
            asyncio.create_task(
                stream(http, "[[neighbour]]", transcript, max_tokens=len(NEIGHBOUR) + 1)
            )
            for transcript in neighbours
        ]
        await asyncio.gather(*(transcript.has_chunks(1) for transcript in neighbours))

        def leave_hard() -> None:
            connection = open_stream(rig, "[[endless]]", max_tokens=2000)
            read_events(connection, 3)
            reset(connection)

        for _ in range(10):
            await asyncio.gather(*(asyncio.to_thread(leave_hard) for _ in range(5)))

        def only_neighbours() -> bool:
            """As gateway and ledger know it; the workers' word comes once a second."""
            num_open = max(rig.metric(GAUGES[0]), rig.redis.zcard("deadlines"))
            return num_open <= len(neighbours)

        await asyncio.to_thread(wait_until, only_neighbours, 1)
        beats = await asyncio.to_thread(fresh_beats, rig)
        assert sum(beat["num_running"] for beat in beats.values()) <= len(neighbours)
        assert not all(transcript.is_done for transcript in neighbours), "they still run"
        await asyncio.gather(*running)

    assert [transcript.text for transcript in neighbours] == ["".join(NEIGHBOUR)] * 3
    await asyncio.to_thread(wait_idle, rig)
    ran = await asyncio.to_thread(num_tokens_run, rig) - before
    # Measured: a cut stream runs three steps or four. A dozen more is a quarter of a second.
    num_prompt_tokens = 50 * len("[[endless]]") + 3 * len("[[neighbour]]")
    assert ran < num_prompt_tokens + 3 * len(NEIGHBOUR) + 50 * 15


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_c067_a_client_that_leaves_before_the_first_token_is_forgotten(
    rig: Rig, *, streams: bool
) -> None:
    def leave() -> None:
        request = body("[[slow-start]]", stream=streams, max_tokens=2000)
        connection = connect(rig)
        connection.sendall(post_bytes(COMPLETIONS, request))
        wait_until(lambda: sum(rig.metric(name) for name in GAUGES) > 0, 5)
        reset(connection)

    for _ in range(3):
        await asyncio.to_thread(leave)
    await asyncio.to_thread(wait_idle, rig)


async def test_c067_a_client_of_a_whole_answer_that_leaves_stops_it(rig: Rig) -> None:
    def leave() -> None:
        connection = connect(rig)
        connection.sendall(post_bytes(COMPLETIONS, body("[[endless]]", max_tokens=3000)))
        wait_until(lambda: rig.metric(GAUGES[0]) > 0, 5)
        reset(connection)

    await asyncio.to_thread(leave)
    await asyncio.to_thread(wait_idle, rig)


async def test_c067_all_choices_of_a_client_that_leaves_are_stopped(rig: Rig) -> None:
    def leave() -> None:
        connection = open_stream(rig, "[[endless]]", max_tokens=2000, n=4)
        read_events(connection, 9)
        reset(connection)

    await asyncio.to_thread(leave)
    await asyncio.to_thread(wait_idle, rig)


async def test_c074_a_stream_is_resumed_while_it_runs_and_after_it_ended(rig: Rig) -> None:
    async with client(rig) as http:
        running = JobReading(await submit_job(http, "[[counted]]", max_tokens=60))
        await running.read(http, stop_after=7)
        state = (await http.get(f"/v1/jobs/{running.job_id}")).json()
        assert state["status"] == "running"
        assert state["finish_reason"] is None
        await running.read(http)

        unbroken = JobReading(running.job_id)
        await unbroken.read(http)
        ended = JobReading(running.job_id)
        await ended.read(http, stop_after=7)
        await ended.read(http)
        answer = (await http.get(f"/v1/jobs/{running.job_id}")).json()
        past = JobReading(running.job_id, last_id=max(unbroken.pieces))
        await past.read(http)

        for reading in (running, unbroken, ended):
            assert reading.text == answer["text"] == "".join(COUNTED)
            assert reading.end == unbroken.end
            assert sorted(reading.pieces) == list(range(len(COUNTED) + 1))
        assert answer["status"] == "finished"
        assert answer["usage"]["completion_tokens"] == len(COUNTED)
        assert not past.pieces, "the end was seen already"


async def test_c074_both_ways_to_say_where_to_go_on_agree(rig: Rig) -> None:
    async with client(rig) as http:
        job_id = await submit_job(http, "[[counted]]", max_tokens=60)
        url = f"/v1/jobs/{job_id}/stream"
        by_header = await http.get(url, headers={"Last-Event-ID": "30"})
        by_query = await http.get(url, params={"starting_after": "30"})
        assert by_header.text == by_query.text
        assert by_header.text.startswith("id: 31\ndata: {")
        assert by_header.text.endswith("data: [DONE]\n\n")
        for wrong in ("x", "-1", "1.5", "9" * 30, "٣"):
            answer = await http.get(url, headers={"Last-Event-ID": wrong.encode()})
            assert_error(answer, 400, param="Last-Event-ID")


async def test_c074_after_the_retention_the_job_is_gone(rig: Rig) -> None:
    async with client(rig) as http:
        job_id = await submit_job(http, "short", max_tokens=5)
        await JobReading(job_id).read(http)
        ended_s = time.monotonic()
        assert (await http.get(f"/v1/jobs/{job_id}")).status_code == 200

        def is_gone() -> bool:
            return httpx.get(f"{rig.base_url}/v1/jobs/{job_id}").status_code != 200

        await asyncio.to_thread(wait_until, is_gone, RETENTION_S + 3)
        assert time.monotonic() - ended_s > RETENTION_S - 1
        for path in (f"/v1/jobs/{job_id}", f"/v1/jobs/{job_id}/stream"):
            assert_error(await http.get(path), 404, code="not_found")
        assert_error(await http.delete(f"/v1/jobs/{job_id}"), 404, code="not_found")


async def test_c078_a_stop_of_the_gateway_cuts_nobody_off_before_its_time(rig: Rig) -> None:
    short = [Transcript() for _ in range(10)]
    endless = Transcript()
    process = rig.processes["gateway"]
    async with client(rig) as http:
        running = [
            asyncio.create_task(stream(http, "[[counted]]", transcript, max_tokens=60))
            for transcript in short[:5]
        ]
        cut = asyncio.create_task(stream(http, "[[endless]]", endless, max_tokens=3000))
        await asyncio.gather(*(transcript.has_chunks(1) for transcript in (*short[:5], endless)))
        running += [
            asyncio.create_task(stream(http, "[[waits]]", transcript, max_tokens=60))
            for transcript in short[5:]
        ]
        await asyncio.to_thread(wait_until, lambda: rig.redis.zcard("deadlines") == 11)
        rig.signal("gateway", signal.SIGTERM)

        def is_unready() -> bool:
            return httpx.get(f"{rig.base_url}/readyz", timeout=5).status_code == 503

        await asyncio.to_thread(wait_until, is_unready, 3)
        assert not all(transcript.is_done for transcript in short), "they still run"
        assert (await http.get("/healthz")).status_code == 200
        refused = await http.post(COMPLETIONS, json=body("new work", max_tokens=2))
        assert_error(refused, 503, code="draining")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        await asyncio.wait_for(asyncio.gather(*running, cut), DRAIN_S + 10)
    status = await asyncio.to_thread(process.wait, 10)
    await asyncio.to_thread(rig.start_gateway)
    await asyncio.to_thread(rig.wait_ready)

    assert status == 0
    assert [transcript.text for transcript in short] == ["".join(COUNTED)] * 10
    assert all(transcript.is_done and transcript.error is None for transcript in short)
    assert endless.error is not None
    assert (endless.error["code"], endless.finish_reason) == ("draining", None)
    assert endless.is_done
    await asyncio.to_thread(wait_idle, rig, 10)


async def test_c153_gauges_fall_to_zero_when_a_hundred_streams_are_cut(rig: Rig) -> None:
    def start() -> list[socket.socket]:
        return [open_stream(rig, "[[endless]]", max_tokens=2000) for _ in range(100)]

    connections = await asyncio.to_thread(start)
    await asyncio.to_thread(wait_until, lambda: sum(rig.metric(name) for name in GAUGES) == 100, 20)
    await asyncio.to_thread(wait_until, lambda: rig.metric(GAUGES[0]) >= 64, 20)
    cut_s = time.monotonic()
    for connection in connections:
        reset(connection)
    await asyncio.to_thread(wait_idle, rig)
    assert time.monotonic() - cut_s < 5
    async with client(rig) as http:
        assert (await complete(http, "as before", max_tokens=9))["choices"][0]["text"]


async def test_c155_metrics_do_not_grow_with_what_clients_send(rig: Rig) -> None:
    secrets = random.Random(5)  # noqa: S311
    words = [f"w{secrets.getrandbits(64):x}" for _ in range(500)]

    async def series(http: httpx.AsyncClient) -> str:
        return (await http.get("/metrics")).text

    async with client(rig) as http:

        async def strange(word: str) -> None:
            headers = {"Authorization": f"Bearer sk-{word}", "X-Request-ID": word}
            await http.get(f"/v1/xyz{word}", headers=headers)
            await http.get(f"/v1/models/{word}", headers=headers)
            await http.get(f"/v1/jobs/job-{word}", headers=headers)
            await http.post(COMPLETIONS, json={"model": word, "prompt": word}, headers=headers)
            fields = {"user": word, word: word, "metadata": {word: word}}
            await http.post("/v1/chat/completions", json=chat_body(word, **fields), headers=headers)

        await strange("first")
        await complete(http, "counted too", max_tokens=2, user="u", metadata={"a": "b"})
        before = await series(http)
        before = await series(http)  # the look itself is counted from the second on
        limit = asyncio.Semaphore(20)

        async def one(word: str) -> None:
            async with limit:
                await strange(word)

        await asyncio.gather(*(one(word) for word in words))
        after = await series(http)

    # Workers and cache daemon add a few lines of theirs when they report; 2,500 requests add none.
    assert len(after.splitlines()) < len(before.splitlines()) + 20
    assert not re.search("|".join([*words[:50], "sk-"]), after)
