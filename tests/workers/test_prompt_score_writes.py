"""The sink writes a prompt's scores before any token, and again if the store lost them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis

from pipeline.ledger.admission import AdmissionLimits
from pipeline.ledger.claim import ClaimedRequest
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.keys import scores_key, tokens_key
from pipeline.ledger.store import connect, connect_async
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.protocol.failure import Ending, FinishReason
from pipeline.protocol.request import Request
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.tokens import TokenRecord, pack_records
from workers.sequence import Sequence, StepOutput
from workers.token_sink import TokenSink

LIMIT_S = 10.0
SAMPLING = SamplingParams(max_tokens=3, echo=True, num_logprobs=0)
SCORES = [TokenRecord(2, -1.0), TokenRecord(3, -2.0)]
OUTPUT = [TokenRecord(7, -0.5), TokenRecord(8, -0.25), TokenRecord(9, -0.125)]


class Listener:
    """Waits for the ending."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def on_admitted(self, sequence: Sequence) -> None: ...
    def on_ended(self, sequence: Sequence) -> None:
        self.ended.set()

    def on_handed_over(self, sequence: Sequence) -> None: ...
    def on_superseded(self, request_id: str, attempt: int) -> None: ...
    def on_cancelled(self, request_id: str) -> None: ...


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    connection = connect(redis_url)
    yield connection
    connection.close()


@pytest.fixture
async def claimed(redis_url: str, client: redis.Redis) -> WorkerLedger:
    """A ledger in which worker w1 owns the request r1."""
    connection = connect_async(redis_url)
    request = Request("r1", "m", [1, 2, 3], SAMPLING)
    limits = AdmissionLimits(max_waiting=9)
    await ClientLedger(connection, limits=limits, retention_s=60).submit(request, "prefill.m", "g")
    await connection.aclose()
    ledger = WorkerLedger(client, max_attempts=2, retention_s=60)
    assert isinstance(ledger.claim("r1", "w1", ("prefill.m",)), ClaimedRequest)
    return ledger


def running(ledger: WorkerLedger) -> tuple[TokenSink, Listener, Sequence]:
    listener = Listener()
    sink = TokenSink("w1", ledger, listener, lambda *_: False, lambda _: None)
    sequence = Sequence("r1", 1, [1, 2, 3], 3, SAMPLING, bytes(32))
    sink.open(sequence, [])
    sink.start()
    return sink, listener, sequence


async def test_scores_stand_in_the_ledger_when_the_ending_does(
    claimed: WorkerLedger, client: redis.Redis
) -> None:
    sink, listener, sequence = running(claimed)

    sink.on_step([StepOutput(sequence, 0, None, Ending(FinishReason.LENGTH), SCORES)])

    assert listener.ended.wait(LIMIT_S)
    assert client.get(scores_key("r1")) == pack_records(SCORES, 0)
    sink.close()


async def test_scores_that_the_store_lost_are_written_again_with_the_tokens(
    claimed: WorkerLedger, client: redis.Redis
) -> None:
    sink, listener, sequence = running(claimed)
    sink.on_step([StepOutput(sequence, 0, OUTPUT[0], prompt_records=SCORES)])
    for _ in range(1000):
        if client.strlen(tokens_key("r1")):
            break
        listener.ended.wait(0.01)
    assert client.get(scores_key("r1")) == pack_records(SCORES, 0)
    client.delete(scores_key("r1"), tokens_key("r1"))

    sink.on_step([StepOutput(sequence, 1, OUTPUT[1])])
    sink.on_step([StepOutput(sequence, 2, OUTPUT[2], Ending(FinishReason.LENGTH))])

    assert listener.ended.wait(LIMIT_S)
    assert client.get(tokens_key("r1")) == pack_records(OUTPUT, 0)
    assert client.get(scores_key("r1")) == pack_records(SCORES, 0)
    sink.close()
