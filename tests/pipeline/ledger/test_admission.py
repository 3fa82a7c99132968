"""What is refused before it waits, and how long a refused client is told to stay away."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable

import pytest
import redis
import redis.asyncio

from pipeline.errors import FullWhat, Overloaded
from pipeline.ledger.admission import AdmissionLimits
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.store import connect_async
from pipeline.ledger.worker_ledger import LogWrite, WorkerLedger
from pipeline.protocol.request import Priority, Request

MakeRequest = Callable[..., Request]


@pytest.fixture
async def connection(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    connection = connect_async(redis_url)
    yield connection
    await connection.aclose()


def beat(ledger: WorkerLedger, worker: str, places: int, **fields: object) -> None:
    state = {"queues": ["prefill.m", "decode.m.a"], "capacity": places, "role": "both"}
    ledger.beat(worker, 60.0, json.dumps(state | fields))


async def refused(
    connection: redis.asyncio.Redis, limits: AdmissionLimits, request: Request, rate: float = 0.0
) -> Overloaded:
    gateway = ClientLedger(connection, limits=limits, retention_s=60)
    with pytest.raises(Overloaded) as found:
        await gateway.submit(request, "prefill.m", "gateway:g", rate)
    return found.value


async def test_running_requests_do_not_count_as_waiting(
    connection: redis.asyncio.Redis, worker_ledger: WorkerLedger, make_request: MakeRequest
) -> None:
    beat(worker_ledger, "w1", 2)
    limits = AdmissionLimits(max_waiting=3)
    gateway = ClientLedger(connection, limits=limits, retention_s=60)
    for number in range(5):
        await gateway.submit(make_request(f"r{number}"), "prefill.m", "gateway:g")

    error = await refused(connection, limits, make_request("r5"))

    assert error.what is FullWhat.WAITING
    assert 1 <= error.retry_after_s <= 60


async def test_two_gateways_share_one_limit(
    connection: redis.asyncio.Redis, make_request: MakeRequest
) -> None:
    limits = AdmissionLimits(max_waiting=2)
    for name in ("a", "b"):
        gateway = ClientLedger(connection, limits=limits, retention_s=60)
        await gateway.submit(make_request(name), "prefill.m", f"gateway:{name}")

    assert (await refused(connection, limits, make_request("c"))).what is FullWhat.WAITING


async def test_waiting_prompt_tokens_are_bounded_and_counted_once(
    connection: redis.asyncio.Redis,
    client: redis.Redis,
    worker_ledger: WorkerLedger,
    make_request: MakeRequest,
) -> None:
    beat(worker_ledger, "w1", 8)
    limits = AdmissionLimits(max_waiting=99, max_waiting_tokens=10)
    gateway = ClientLedger(connection, limits=limits, retention_s=60)
    await gateway.submit(make_request("r1", prompt_tokens=[1] * 50), "prefill.m", "gateway:g")
    error = await refused(connection, limits, make_request("r2"))
    worker_ledger.claim("r1", "w1", ("prefill.m",))
    for _ in range(2):
        worker_ledger.write_step("w1", [LogWrite("r1", 1, 0, b"abcd", "", 0)])

    await gateway.submit(make_request("r2"), "prefill.m", "gateway:g")

    assert error.what is FullWhat.TOKENS
    assert client.get("owed_tokens:m") == b"3"


async def test_a_tenant_meets_its_own_limit_and_others_do_not(
    connection: redis.asyncio.Redis, worker_ledger: WorkerLedger, make_request: MakeRequest
) -> None:
    limits = AdmissionLimits(max_waiting=99, max_open_per_tenant=2)
    gateway = ClientLedger(connection, limits=limits, retention_s=60)
    for name in ("r1", "r2"):
        await gateway.submit(make_request(name), "prefill.m", "gateway:g")

    error = await refused(connection, limits, make_request("r3"))
    await gateway.submit(make_request("r4", tenant="t2"), "prefill.m", "gateway:g")
    await gateway.cancel("r1")
    await gateway.submit(make_request("r5"), "prefill.m", "gateway:g")

    assert error.what is FullWhat.TENANT
    assert error.is_callers_own


async def test_a_model_has_a_limit_of_its_own(
    connection: redis.asyncio.Redis, make_request: MakeRequest
) -> None:
    limits = AdmissionLimits(max_waiting=99, max_open_per_model=1)
    gateway = ClientLedger(connection, limits=limits, retention_s=60)
    await gateway.submit(make_request("r1"), "prefill.m", "gateway:g")

    assert (await refused(connection, limits, make_request("r2"))).what is FullWhat.MODEL


async def test_a_request_that_would_wait_too_long_is_refused_with_the_time_that_is_missing(
    connection: redis.asyncio.Redis, make_request: MakeRequest
) -> None:
    limits = AdmissionLimits(max_waiting=99)
    gateway = ClientLedger(connection, limits=limits, retention_s=60)
    await gateway.submit(
        make_request("r1", prompt_tokens=[1] * 900), "prefill.m", "gateway:g", 100.0
    )

    error = await refused(connection, limits, make_request("r2", queue_deadline_s=5.0), 100.0)
    await gateway.submit(make_request("r3", queue_deadline_s=10.0), "prefill.m", "gateway:g", 100.0)

    assert error.what is FullWhat.DEADLINE
    assert error.retry_after_s == 4


async def test_batches_leave_the_last_seats_to_others(
    connection: redis.asyncio.Redis, make_request: MakeRequest
) -> None:
    limits = AdmissionLimits(max_waiting=4)
    gateway = ClientLedger(connection, limits=limits, retention_s=60)
    for number in range(3):
        await gateway.submit(
            make_request(f"b{number}", priority=Priority.BATCH), "prefill.m", "gateway:g"
        )

    error = await refused(connection, limits, make_request("b3", priority=Priority.BATCH))
    await gateway.submit(make_request("r1"), "prefill.m", "gateway:g")

    assert error.what is FullWhat.WAITING


async def test_an_ending_that_is_written_twice_is_counted_once(
    connection: redis.asyncio.Redis,
    client: redis.Redis,
    worker_ledger: WorkerLedger,
    make_request: MakeRequest,
) -> None:
    gateway = ClientLedger(connection, limits=AdmissionLimits(9), retention_s=60)
    await gateway.submit(make_request("r1"), "prefill.m", "gateway:g")
    worker_ledger.claim("r1", "w1", ("prefill.m",))
    for _ in range(2):
        worker_ledger.write_step("w1", [LogWrite("r1", 1, 0, b"abcd", "stop", 0)])

    assert client.hget("counters", "finished") == b"1"
    left = {key.decode() for key in client.scan_iter()}
    assert left == {"asked_lately:m", "counters", "queues", "request:r1", "tokens:r1"}
