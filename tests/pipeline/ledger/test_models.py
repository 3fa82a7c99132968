"""Models share the ledger and nothing else: places, limits, lines and trials are each one's own."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis

from pipeline.errors import FullWhat, Overloaded
from pipeline.ledger.admission import AdmissionLimits
from pipeline.ledger.backlog import ModelBacklog, read_backlog_now
from pipeline.ledger.claim import ClaimedRequest
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.messages import QueueMessage
from pipeline.ledger.store import connect_async
from pipeline.ledger.worker_ledger import LogWrite, WorkerLedger
from pipeline.protocol.request import Request

LIMITS = AdmissionLimits(max_waiting=2, max_waiting_tokens=20, max_open_per_model=4)


@pytest.fixture
async def gateway(redis_url: str) -> AsyncIterator[ClientLedger]:
    connection = connect_async(redis_url)
    yield ClientLedger(connection, limits=LIMITS, retention_s=60)
    await connection.aclose()


def beat(ledger: WorkerLedger, worker: str, slug: str, places: int) -> None:
    queues = [f"prefill.{slug}", f"decode.{slug}.n"]
    state = {"queues": queues, "capacity": places, "role": "both", "max_ahead_tokens": 30}
    ledger.beat(worker, 60.0, json.dumps(state))


async def test_the_limits_of_a_model_count_its_own_requests_only(
    gateway: ClientLedger,
    worker_ledger: WorkerLedger,
    client: redis.Redis,
    make_request: Callable[..., Request],
) -> None:
    beat(worker_ledger, "wa", "a", 1)
    beat(worker_ledger, "wb", "b", 1)

    async def submit(name: str, slug: str, **fields: Any) -> list[QueueMessage]:
        request = make_request(name, model=slug, **fields)
        return await gateway.submit(request, f"prefill.{slug}", "gateway:g")

    for number in range(3):
        await submit(f"a{number}", "a")
    with pytest.raises(Overloaded) as full:
        await submit("a3", "a")
    assert full.value.what is FullWhat.WAITING

    assert await submit("b0", "b") == [QueueMessage("b0", "prefill.b", 3)]
    with pytest.raises(Overloaded) as tokens:
        await submit("b1", "b", prompt_tokens=[1] * 30)
    assert tokens.value.what is FullWhat.TOKENS
    assert tokens.value.count == 3, "tokens of b, not of a"
    backlog = read_backlog_now(client)
    assert backlog.models == {"a": ModelBacklog(3, 1), "b": ModelBacklog(1, 0)}
    assert (backlog.num_open, backlog.num_held) == (4, 1)


async def test_room_in_one_model_releases_only_its_own_line(
    gateway: ClientLedger, worker_ledger: WorkerLedger, make_request: Callable[..., Request]
) -> None:
    for slug in ("a", "b"):
        beat(worker_ledger, f"w{slug}", slug, 1)
        for number in range(3):
            request = make_request(f"{slug}{number}", model=slug)
            await gateway.submit(request, f"prefill.{slug}", "gateway:g")
        claim = worker_ledger.claim(f"{slug}0", f"w{slug}", (f"prefill.{slug}",))
        assert isinstance(claim, ClaimedRequest)

    ended = worker_ledger.write_step("wb", [LogWrite("b0", 1, 0, b"abcd", "stop", 0)])

    assert ended.messages == [QueueMessage("b2", "prefill.b", 3)]


async def test_a_model_on_trial_does_not_hold_the_trial_of_another(
    gateway: ClientLedger,
    worker_ledger: WorkerLedger,
    client: redis.Redis,
    make_request: Callable[..., Request],
) -> None:
    released = []
    for slug in ("a", "b"):
        request = make_request("r" + slug, model=slug)
        await gateway.submit(request, f"prefill.{slug}", "gateway:g")
        worker_ledger.claim("r" + slug, "w" + slug, (f"prefill.{slug}",))
        client.hset("request:r" + slug, "crashed", "earlier ")
        client.delete("lease:w" + slug)
        released += worker_ledger.requeue_lost("r" + slug, "w" + slug, f"prefill.{slug}") or []

    assert [message.request_id for message in released] == ["ra", "rb"]
    assert client.mget("on_trial:a", "on_trial:b") == [b"ra", b"rb"]


async def test_the_last_request_of_a_model_leaves_nothing_behind(
    gateway: ClientLedger,
    worker_ledger: WorkerLedger,
    client: redis.Redis,
    make_request: Callable[..., Request],
) -> None:
    beat(worker_ledger, "wa", "a", 1)
    for number in range(3):
        await gateway.submit(make_request(f"a{number}", model="a"), "prefill.a", "gateway:g")
    await gateway.submit(make_request("b0", model="b"), "unplaced.b", "gateway:g")
    for number in range(3):
        await gateway.cancel(f"a{number}")

    left = {key.decode() for key in client.scan_iter() if key.decode().endswith((":a", ".a:3"))}
    assert left <= {"pace_ms:a", "asked_lately:a"}


async def test_what_is_left_of_a_request_whose_key_is_gone_takes_no_room_for_ever(
    gateway: ClientLedger,
    worker_ledger: WorkerLedger,
    client: redis.Redis,
    make_request: Callable[..., Request],
) -> None:
    beat(worker_ledger, "wa", "a", 1)
    at_ms = time.time() * 1000 - 1_000
    client.zadd("open:model:a", {f"ghost{number}": at_ms for number in range(2)})
    request = make_request("a0", model="a")
    assert await gateway.submit(request, "prefill.a", "gateway:g") == []

    assert worker_ledger.release() == [QueueMessage("a0", "prefill.a", 3)]
    assert client.zrange("open:model:a", 0, -1) == [b"a0"]
