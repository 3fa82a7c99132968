"""A request that kills its worker is found out, and its neighbours keep their attempts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from pipeline.ledger.admission import AdmissionLimits
from pipeline.ledger.claim import ClaimedRequest
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.messages import QueueMessage
from pipeline.ledger.store import connect, connect_async
from pipeline.ledger.worker_ledger import LogWrite, WorkerLedger
from pipeline.protocol.request import Request
from pipeline.protocol.sampling import SamplingParams

QUEUE = "decode.m.a"


@dataclass
class Ward:
    """Requests on workers that die."""

    client: Any
    gateway: ClientLedger
    ledger: WorkerLedger

    async def submit(self, *names: str) -> None:
        for name in names:
            request = Request(name, "m", [1, 2], SamplingParams(max_tokens=9), tenant_salt="s")
            await self.gateway.submit(request, QUEUE, "gateway:g")

    def start(self, worker: str, *names: str) -> None:
        for name in names:
            assert isinstance(self.ledger.claim(name, worker, (QUEUE,)), ClaimedRequest)

    def lose(self, worker: str) -> tuple[str | None, list[QueueMessage]]:
        """The one who is proven guilty, and what is sent."""
        guilty = self.ledger.convict(worker)
        sent: list[QueueMessage] = []
        for name in sorted(self.client.smembers(f"running:{worker}")):
            sent += self.ledger.requeue_lost(name.decode(), worker, QUEUE) or []
        self.ledger.leave(worker)
        return guilty, sent

    def write(self, worker: str, name: str) -> list[QueueMessage]:
        fields = self.client.hmget(f"request:{name}", "attempt")
        offset = self.client.strlen(f"tokens:{name}")
        write = LogWrite(name, int(fields[0]), offset, b"abcd", "", 0)
        return self.ledger.write_step(worker, [write]).messages

    def losses(self, *names: str) -> list[int]:
        return [int(self.client.hget(f"request:{name}", "losses")) for name in names]


@pytest.fixture
async def ward(redis_url: str) -> AsyncIterator[Ward]:
    client, connection = connect(redis_url), connect_async(redis_url)
    gateway = ClientLedger(connection, limits=AdmissionLimits(99), retention_s=60)
    yield Ward(
        client, gateway, WorkerLedger(client, max_attempts=3, retention_s=60, retry_pause_s=0)
    )
    await connection.aclose()
    client.close()


async def test_a_request_alone_on_its_worker_is_guilty(ward: Ward) -> None:
    await ward.submit("p")
    ward.start("w1", "p")

    assert ward.lose("w1")[0] == "p"
    assert ward.losses("p") == [1]


async def test_the_only_one_common_to_two_crashes_pays_for_both(ward: Ward) -> None:
    await ward.submit("p", "a", "b", "c")
    ward.start("w1", "p", "a")
    assert ward.lose("w1")[0] is None
    assert ward.losses("p", "a") == [1, 1]
    ward.start("w2", "p", "b", "c")

    assert ward.lose("w2")[0] == "p"
    assert ward.losses("p", "a", "b", "c") == [2, 0, 0, 0]


async def test_after_two_crashes_together_each_goes_on_alone_until_it_wrote(ward: Ward) -> None:
    names = ("a", "b", "p")
    await ward.submit(*names)
    ward.start("w1", *names)
    _, sent = ward.lose("w1")
    assert len(sent) == 3, "after one crash all go on at once"
    ward.start("w2", *names)

    _, sent = ward.lose("w2")
    assert [message.request_id for message in sent] == ["a"]
    ward.start("w3", "a")
    assert [message.request_id for message in ward.write("w3", "a")] == ["b"]
    ward.start("w3", "b")
    assert [message.request_id for message in ward.write("w3", "b")] == ["p"]
    ward.start("w3", "p")
    guilty, sent = ward.lose("w3")

    assert guilty == "p"
    assert ward.losses("a", "b") == [0, 0], "and is acquitted of the crashes before"
    assert ward.client.hget("request:p", "ending") == b"error:worker_lost"
    assert sent, "the others go on"


async def test_the_verdict_is_the_same_when_asked_again(ward: Ward) -> None:
    await ward.submit("p", "a")
    ward.start("w1", "p", "a")
    ward.ledger.convict("w1")
    ward.ledger.convict("w1")
    ward.lose("w1")

    assert ward.losses("p", "a") == [1, 1]


async def test_a_trial_ends_with_the_request(ward: Ward) -> None:
    await ward.submit("a", "b")
    for worker in ("w1", "w2"):
        ward.start(worker, "a", "b")
        ward.lose(worker)
    await ward.gateway.cancel("a")

    assert [message.request_id for message in ward.ledger.release()] == ["b"]


async def test_a_dead_letter_keeps_its_prompt_and_can_be_tried_again(ward: Ward) -> None:
    await ward.submit("p")
    for worker in ("w1", "w2", "w3"):
        ward.start(worker, "p")
        ward.write(worker, "p")
        ward.lose(worker)
    assert ward.client.lrange("dead_letters", 0, -1) == [b"p"]

    assert ward.ledger.revive("p", QUEUE, 600) == [QueueMessage("p", QUEUE, 3)]
    claimed = ward.ledger.claim("p", "w4", (QUEUE,))

    assert isinstance(claimed, ClaimedRequest)
    assert claimed.prompt_tokens == [1, 2]
    assert len(claimed.logged) == 3
    assert claimed.remaining_s > 590
    assert ward.losses("p") == [0]
    assert not ward.client.exists("dead_letters")
    assert ward.ledger.revive("p", QUEUE, 600) is None
