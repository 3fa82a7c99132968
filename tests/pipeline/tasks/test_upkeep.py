"""What upkeep finds and mends, round by round, on a real broker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from pipeline.ledger.admission import AdmissionLimits
from pipeline.ledger.claim import ClaimedRequest
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.dead_letters import FaultLog
from pipeline.ledger.overview import LedgerOverview
from pipeline.ledger.store import connect, connect_async
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.protocol.request import Priority, Request
from pipeline.protocol.sampling import SamplingParams
from pipeline.scheduling.fleet import Fleet, Role, WorkerState, queues_of
from pipeline.tasks.app import make_app
from pipeline.tasks.publisher import Publisher
from pipeline.tasks.upkeep import LOST_MESSAGE_MS, Upkeep
from tests.flow.rig import wait_until


@dataclass
class Shop:
    """A ledger, a broker and an upkeep whose rounds the test runs itself."""

    client: Any
    gateway: ClientLedger
    ledger: WorkerLedger
    overview: LedgerOverview
    upkeep: Upkeep

    async def submit(self, request_id: str, queue: str, **fields: Any) -> None:
        model = fields.pop("model", "m")
        request = Request(request_id, model, [1, 2], SamplingParams(max_tokens=4), **fields)
        await self.gateway.submit(request, queue, "gateway:g")

    def beat(self, worker: str, role: Role, node: str = "a", model: str = "m") -> None:
        state = WorkerState(
            worker=worker,
            node=node,
            role=role,
            model=model,
            namespace="n",
            queues=queues_of(role, model, node),
            capacity=4,
        )
        self.ledger.beat(worker, 4.0, state.model_dump_json())

    def lose(self, worker: str) -> None:
        self.client.delete(f"lease:{worker}")

    def age(self, request_id: str, queue: str, by_ms: int) -> None:
        """Make a released request have waited longer."""
        self.client.zincrby(f"released:{queue}:3", -by_ms, request_id)
        self.client.hincrby(f"request:{request_id}", "released_ms", -by_ms)

    def field(self, request_id: str, name: str) -> str:
        return (self.client.hget(f"request:{request_id}", name) or b"").decode()


@pytest.fixture
async def shop(redis_url: str) -> AsyncIterator[Shop]:
    client = connect(redis_url)
    connection = connect_async(redis_url)
    ledger = WorkerLedger(client, max_attempts=3, retention_s=60)
    overview = LedgerOverview(client)
    app = make_app(redis_url)
    upkeep = Upkeep("u1", overview, ledger, Publisher(app), 4.0, FaultLog(client))
    gateway = ClientLedger(connection, limits=AdmissionLimits(9), retention_s=60)
    yield Shop(client, gateway, ledger, overview, upkeep)
    app.close()
    await connection.aclose()
    client.close()


async def test_requests_of_a_lost_worker_are_queued_again_and_it_is_struck_off(shop: Shop) -> None:
    shop.beat("d1", Role.DECODE)
    shop.beat("d2", Role.DECODE, "b")
    await shop.submit("r1", "decode.m.a")
    assert isinstance(shop.ledger.claim("r1", "d1", ("decode.m.a",)), ClaimedRequest)
    shop.lose("d1")

    shop.upkeep.tick(100.0)

    assert (shop.field("r1", "state"), shop.field("r1", "queue")) == ("queued", "decode.m.b")
    assert shop.field("r1", "attempt") == "2"
    assert shop.overview.num_messages("decode.m.b") == 1
    assert b"d1" not in shop.client.hgetall("workers")


async def test_leases_are_not_trusted_after_a_gap_of_ones_own(shop: Shop) -> None:
    shop.beat("d1", Role.DECODE)
    await shop.submit("r1", "decode.m.a")
    shop.ledger.claim("r1", "d1", ("decode.m.a",))
    shop.lose("d1")
    shop.upkeep._note_contact(100.0)
    shop.upkeep._note_contact(110.0)

    shop.upkeep.tick(110.1)
    assert shop.field("r1", "state") == "running"
    shop.upkeep.tick(114.2)
    assert shop.field("r1", "state") == "queued"


async def test_leases_are_not_trusted_by_one_that_has_just_begun(shop: Shop) -> None:
    shop.beat("d1", Role.DECODE)
    shop.beat("d2", Role.DECODE, "b")
    await shop.submit("r1", "decode.m.a")
    shop.ledger.claim("r1", "d1", ("decode.m.a",))
    shop.lose("d1")
    await shop.submit("r2", "decode.m.gone")
    shop.upkeep.lease_s = 3600.0

    shop.upkeep.start()
    try:
        wait_until(lambda: shop.field("r2", "queue") != "decode.m.gone")
    finally:
        shop.upkeep.close()

    assert shop.field("r1", "state") == "running"


async def test_what_waits_for_a_dead_node_moves_to_a_living_one(shop: Shop) -> None:
    await shop.submit("r1", "decode.m.gone")
    shop.beat("d2", Role.DECODE, "b")

    shop.upkeep.tick(100.0)

    assert shop.field("r1", "queue") == "decode.m.b"
    assert shop.overview.num_messages("decode.m.b") == 1


async def test_unplaced_requests_are_placed_when_a_worker_comes(shop: Shop) -> None:
    await shop.submit("r1", "unplaced.m")
    shop.upkeep.tick(100.0)
    assert shop.field("r1", "queue") == "unplaced.m"
    shop.beat("d1", Role.DECODE)
    shop.upkeep.tick(101.0)
    assert shop.field("r1", "queue") == "decode.m.a"
    shop.beat("p1", Role.PREFILL)
    await shop.submit("r2", "unplaced.m")
    shop.upkeep.tick(102.0)
    assert shop.field("r2", "queue") == "prefill.m"


async def test_a_message_that_the_broker_lost_is_sent_again_once_a_second(shop: Shop) -> None:
    shop.beat("d1", Role.DECODE)
    await shop.submit("r1", "decode.m.a")
    shop.upkeep.tick(100.0)
    assert shop.overview.num_messages("decode.m.a") == 0, "it may still be on its way"
    shop.age("r1", "decode.m.a", LOST_MESSAGE_MS + 100)

    shop.upkeep.tick(100.3)
    assert shop.overview.num_messages("decode.m.a") == 1
    shop.upkeep.tick(100.6)
    assert shop.overview.num_messages("decode.m.a") == 1


async def test_a_request_that_a_younger_one_overtook_is_sent_again(shop: Shop) -> None:
    shop.beat("d1", Role.DECODE)
    publisher = shop.upkeep.publisher
    await shop.submit("old", "decode.m.a")
    shop.age("old", "decode.m.a", LOST_MESSAGE_MS + 100)
    await shop.submit("young", "decode.m.a")
    await shop.submit("waits", "decode.m.a")
    publisher.publish("waits", "decode.m.a", int(Priority.NORMAL))
    shop.upkeep.tick(100.0)
    assert shop.overview.num_messages("decode.m.a") == 1, "a full queue is no proof of a loss"
    shop.ledger.claim("young", "d1", ("decode.m.a",))

    shop.upkeep.tick(100.3)
    assert shop.overview.num_messages("decode.m.a") == 2


async def test_an_overdue_request_ends_with_the_reason(shop: Shop) -> None:
    shop.beat("p1", Role.PREFILL)
    await shop.submit("r1", "prefill.m")
    await shop.submit("r2", "decode.m.gone")
    shop.client.zadd("deadlines", {"r1": 1, "r2": 1})
    for request_id in ("r1", "r2"):
        shop.client.hset(f"request:{request_id}", "queue_deadline_ms", 0)

    shop.upkeep.tick(100.0)

    assert shop.field("r1", "ending") == "error:queue_timeout"
    assert shop.field("r2", "ending") == "error:no_workers"


async def test_a_stuck_worker_loses_a_request_that_is_past_its_deadline(shop: Shop) -> None:
    shop.beat("d1", Role.DECODE)
    await shop.submit("r1", "decode.m.a")
    shop.ledger.claim("r1", "d1", ("decode.m.a",))
    shop.client.zadd("deadlines", {"r1": 1})
    shop.client.hset("request:r1", "deadline_ms", 1)

    shop.upkeep.tick(100.0)

    assert shop.field("r1", "ending") == "error:deadline_exceeded"
    assert shop.ledger.beat("d1", 4.0, "{}")[1] == ["r1"], "its worker is told to stop"


async def test_one_process_leads_at_a_time(shop: Shop) -> None:
    assert shop.overview.lead("u1", 1000)
    assert shop.overview.lead("u1", 1000)
    assert not shop.overview.lead("u2", 1000)
    shop.overview.resign("u2")
    assert not shop.overview.lead("u2", 1000)
    shop.overview.resign("u1")
    assert shop.overview.lead("u2", 1000)


async def test_what_waits_moves_within_its_model(shop: Shop) -> None:
    await shop.submit("ra", "decode.a.gone", model="a")
    await shop.submit("rb", "decode.b.gone", model="b")
    shop.beat("d1", Role.DECODE, "n", "a")

    shop.upkeep.tick(100.0)

    assert shop.field("ra", "queue") == "decode.a.n"
    assert shop.field("rb", "queue") == "unplaced.b"


async def test_requests_of_a_lost_worker_stay_with_their_model(shop: Shop) -> None:
    shop.beat("d1", Role.DECODE, "n", "a")
    shop.beat("d2", Role.DECODE, "n", "b")
    await shop.submit("ra", "decode.a.n", model="a")
    shop.ledger.claim("ra", "d1", ("decode.a.n",))
    shop.lose("d1")

    shop.upkeep.tick(100.0)
    shop.upkeep.tick(100.3)  # the first still has its last heartbeat

    assert shop.field("ra", "queue") == "unplaced.a"


async def test_what_waits_in_queues_of_an_older_build_is_served(shop: Shop) -> None:
    await shop.submit("r1", "prefill")
    await shop.submit("r2", "decode.a")
    await shop.submit("r3", "unplaced", model="b")
    shop.beat("w1", Role.BOTH)

    shop.upkeep.tick(100.0)
    shop.upkeep.tick(100.3)

    assert [shop.field(name, "queue") for name in ("r1", "r2", "r3")] == [
        "prefill.m", "decode.m.a", "unplaced.b",
    ]  # fmt: skip
    assert set(shop.overview.queues()) == {"prefill.m", "decode.m.a", "unplaced.b"}


async def test_a_queue_of_a_node_that_is_gone_leaves_nothing_behind(shop: Shop) -> None:
    queue = "decode.m.short-lived"  # kombu remembers what it has declared, over tests too
    shop.beat("d1", Role.DECODE, "short-lived")
    shop.beat("d2", Role.DECODE, "b")
    await shop.submit("r1", queue)
    shop.upkeep.publisher.publish("r1", queue, int(Priority.NORMAL))
    shop.ledger.leave("d1")

    for now_s in (100.0, 100.3):
        shop.upkeep.tick(now_s)

    assert shop.field("r1", "queue") == "decode.m.b"
    left = [key for key in shop.client.scan_iter() if queue.encode() in key]
    assert left == [], "neither a line, nor a message, nor a binding of the broker"


async def test_a_queue_in_which_a_request_waits_is_not_forgotten(shop: Shop) -> None:
    await shop.submit("r1", "decode.m.a")
    shop.upkeep.publisher.publish("r1", "decode.m.a", int(Priority.NORMAL))

    assert not shop.ledger.forget_queue("decode.m.a")

    assert shop.overview.queues() == ["decode.m.a"]
    assert shop.overview.num_messages("decode.m.a") == 1


async def test_a_leader_that_was_frozen_in_its_round_harms_no_worker_that_is_back(
    shop: Shop,
) -> None:
    shop.beat("d1", Role.DECODE)
    shop.beat("d2", Role.DECODE, "b")
    await shop.submit("r1", "decode.m.a")
    shop.ledger.claim("r1", "d1", ("decode.m.a",))
    now_ms, beats = shop.overview.beats()

    # It had found the lease gone before it froze; meanwhile the worker is back.
    shop.upkeep._take_from_lost(Fleet.decode(beats, now_ms), "d1", now_ms)

    assert shop.overview.is_alive("d1")
    assert shop.client.hexists("slots", "d1")
    assert shop.field("r1", "state") == "running"
    shop.lose("d1")
    shop.upkeep.tick(100.0)
    assert shop.field("r1", "losses") == "1", "no verdict of that round stands"
