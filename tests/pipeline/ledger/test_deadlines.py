"""Deadlines to the first token and between tokens, on the store's clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import redis

from pipeline.ledger.admission import AdmissionLimits, TokenDeadlines
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.store import connect_async
from pipeline.ledger.worker_ledger import LogWrite, WorkerLedger
from pipeline.protocol.failure import FailureCode
from pipeline.protocol.request import Priority, Request

MakeRequest = Callable[..., Request]
FIRST_S, GAP_S = 30.0, 20.0


@pytest.fixture
async def gateway(redis_url: str) -> AsyncIterator[ClientLedger]:
    connection = connect_async(redis_url)
    yield ClientLedger(
        connection,
        limits=AdmissionLimits(9),
        retention_s=60,
        deadlines=TokenDeadlines(FIRST_S, GAP_S),
    )
    await connection.aclose()


def look(client: redis.Redis, ledger: WorkerLedger) -> str | None:
    """Let the time to look at the request come."""
    client.zadd("deadlines", {"r1": 1})
    return ledger.expire("r1", FailureCode.QUEUE_TIMEOUT)


def shift(client: redis.Redis, field: str, by_s: float) -> None:
    client.hincrby("request:r1", field, -int(by_s * 1000))


async def test_a_request_without_a_first_token_in_time_fails(
    gateway: ClientLedger,
    worker_ledger: WorkerLedger,
    client: redis.Redis,
    make_request: MakeRequest,
) -> None:
    await gateway.submit(make_request(), "prefill.m", "gateway:g")
    worker_ledger.claim("r1", "w1", ("prefill.m",))
    assert look(client, worker_ledger) is None
    shift(client, "created_ms", FIRST_S)

    assert look(client, worker_ledger) == "first_token"
    assert client.hget("request:r1", "ending") == b"error:deadline_exceeded"
    assert client.smembers("cancels:w1") == {b"r1"}


async def test_a_stream_that_stands_still_fails_and_one_that_moves_does_not(
    gateway: ClientLedger,
    worker_ledger: WorkerLedger,
    client: redis.Redis,
    make_request: MakeRequest,
) -> None:
    await gateway.submit(make_request(), "prefill.m", "gateway:g")
    worker_ledger.claim("r1", "w1", ("prefill.m",))
    for index in range(3):
        worker_ledger.write_step("w1", [LogWrite("r1", 1, 4 * index, b"abcd", "", 0)])
        assert look(client, worker_ledger) is None
        shift(client, "seen_ms", GAP_S)

    assert look(client, worker_ledger) == "token_gap"


async def test_the_store_looks_again_often_enough_to_be_a_tenth_late_at_most(
    gateway: ClientLedger,
    worker_ledger: WorkerLedger,
    client: redis.Redis,
    make_request: MakeRequest,
) -> None:
    await gateway.submit(make_request(), "prefill.m", "gateway:g")
    worker_ledger.claim("r1", "w1", ("prefill.m",))

    seconds, micros = client.time()
    due_ms = client.zscore("deadlines", "r1")
    assert due_ms is not None
    assert due_ms - (seconds * 1000 + micros / 1000) <= GAP_S * 100


async def test_batches_have_no_deadline_for_a_token(
    gateway: ClientLedger,
    worker_ledger: WorkerLedger,
    client: redis.Redis,
    make_request: MakeRequest,
) -> None:
    await gateway.submit(make_request(priority=Priority.BATCH), "prefill.m", "gateway:g")
    worker_ledger.claim("r1", "w1", ("prefill.m",))
    shift(client, "created_ms", FIRST_S)

    assert look(client, worker_ledger) is None
