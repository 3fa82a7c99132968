"""A request that loses worker after worker is tried again with growing pauses between the tries."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.ledger.claim import ClaimedRequest
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.messages import QueueMessage
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.protocol.request import Request

QUEUE = "decode.m.a"
PAUSE_S = 0.2


@pytest.fixture
def ledger(client: Any) -> WorkerLedger:
    return WorkerLedger(client, max_attempts=9, retention_s=60, retry_pause_s=PAUSE_S)


@pytest.fixture
async def request_id(client_ledger: ClientLedger, make_request: Callable[..., Request]) -> str:
    await client_ledger.submit(make_request("r1"), QUEUE, "gateway:g")
    return "r1"


def now_ms(client: Any) -> int:
    seconds, micros = client.time()
    return int(seconds) * 1000 + int(micros) // 1000


def lose(ledger: WorkerLedger, request_id: str, worker: str) -> list[QueueMessage]:
    """A worker takes the request and dies; what is sent."""
    assert isinstance(ledger.claim(request_id, worker, (QUEUE, "decode.m.b")), ClaimedRequest)
    sent = ledger.requeue_lost(request_id, worker, QUEUE)
    assert sent is not None
    return sent


def test_after_the_first_loss_it_goes_on_at_once(ledger: WorkerLedger, request_id: str) -> None:
    assert lose(ledger, request_id, "w1") == [QueueMessage("r1", QUEUE, 3)]


def test_after_the_second_loss_it_is_sent_when_its_pause_is_over(
    client: Any, ledger: WorkerLedger, request_id: str
) -> None:
    lose(ledger, request_id, "w1")
    lost_ms = now_ms(client)

    assert lose(ledger, request_id, "w2") == []
    limit_s = time.monotonic() + 20
    while not (sent := ledger.release()):
        assert time.monotonic() < limit_s
    assert sent == [QueueMessage("r1", QUEUE, 3)]
    assert now_ms(client) - lost_ms >= PAUSE_S * 1000
    assert client.zcard("resting") == 0
    assert isinstance(ledger.claim(request_id, "w3", (QUEUE,)), ClaimedRequest)


def test_pauses_double_and_are_bounded(client: Any, ledger: WorkerLedger, request_id: str) -> None:
    pauses_ms = []
    for number in range(8):
        before_ms = now_ms(client)
        # A stray message lets the next worker have it before the pause is over.
        lose(ledger, request_id, f"w{number}")
        until_ms = client.zscore("resting", request_id)
        if until_ms is not None:
            pauses_ms.append((until_ms - now_ms(client), until_ms - before_ms))

    expected_ms = [200, 400, 800, 1600, 3200, 6400, 8000]
    assert len(pauses_ms) == len(expected_ms)
    for (least_ms, most_ms), pause_ms in zip(pauses_ms, expected_ms, strict=True):
        assert least_ms <= pause_ms <= most_ms


async def test_a_resting_request_can_be_cancelled(
    client: Any, ledger: WorkerLedger, client_ledger: ClientLedger, request_id: str
) -> None:
    for worker in ("w1", "w2"):
        lose(ledger, request_id, worker)

    assert await client_ledger.cancel(request_id)
    assert client.hget("request:r1", "state") == b"cancelled"
    assert client.zcard("resting") == 0
    assert client.zcard("deadlines") == 0


def test_a_request_that_is_moved_rests_on(
    client: Any, ledger: WorkerLedger, request_id: str
) -> None:
    for worker in ("w1", "w2"):
        lose(ledger, request_id, worker)

    assert ledger.place(request_id, QUEUE, "decode.m.b") == []
    limit_s = time.monotonic() + 20
    while not (sent := ledger.release()):
        assert time.monotonic() < limit_s
    assert sent == [QueueMessage("r1", "decode.m.b", 3)]


def test_a_worker_that_gives_it_back_costs_no_pause(ledger: WorkerLedger, request_id: str) -> None:
    lose(ledger, request_id, "w1")
    assert isinstance(ledger.claim(request_id, "w2", (QUEUE,)), ClaimedRequest)

    assert ledger.give_back(request_id, "w2", QUEUE) == [QueueMessage("r1", QUEUE, 3)]
