"""What becomes of requests whose gateway died: those that nobody can come back for are stopped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from pipeline.ledger.claim import ClaimedRequest
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.worker_ledger import LogWrite, WorkerLedger
from pipeline.protocol.request import JobTerms, Priority, Request
from pipeline.protocol.tokens import TokenRecord, pack_records

MakeRequest = Callable[..., Request]


def claim(ledger: WorkerLedger) -> None:
    assert isinstance(ledger.claim("r1", "w1", ("prefill.m",)), ClaimedRequest)


def cancelled_after(ledger: WorkerLedger, index: int) -> list[str]:
    """What the worker is told to stop when it writes this token."""
    data = pack_records([TokenRecord(65)], None)
    return ledger.write_step("w1", [LogWrite("r1", 1, 4 * index, data, "", 0)]).cancelled


def long_unheard(client: redis.Redis) -> None:
    client.hincrby("request:r1", "deserted_ms", -11_000)


@pytest.mark.parametrize(
    ("fields", "is_tied"),
    [({}, True), ({"job": JobTerms()}, False), ({"priority": Priority.BATCH}, False)],
)
async def test_a_request_whose_gateway_died_is_cancelled_if_nobody_can_come_back_for_it(
    client_ledger: ClientLedger,
    worker_ledger: WorkerLedger,
    make_request: MakeRequest,
    client: redis.Redis,
    fields: dict[str, object],
    *,
    is_tied: bool,
) -> None:
    await client_ledger.submit(make_request(**fields), "prefill.m", "gateway:dead")
    claim(worker_ledger)
    assert cancelled_after(worker_ledger, 0) == [], "it may only have lost its connection"
    long_unheard(client)

    assert cancelled_after(worker_ledger, 1) == (["r1"] if is_tied else [])


async def test_a_gateway_that_is_back_keeps_its_requests(
    client_ledger: ClientLedger,
    worker_ledger: WorkerLedger,
    make_request: MakeRequest,
    client: redis.Redis,
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")
    claim(worker_ledger)
    assert cancelled_after(worker_ledger, 0) == []
    long_unheard(client)
    await client_ledger.watch("r1", "gateway:g", 0)
    assert cancelled_after(worker_ledger, 1) == []
    long_unheard(client)
    with client.pubsub() as bell:
        bell.subscribe("gateway:g")
        assert bell.get_message(timeout=5)
        assert cancelled_after(worker_ledger, 2) == []
