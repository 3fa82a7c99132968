"""Who goes next: fair between tenants by tokens, by priority with ageing, never more than fits."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from pipeline.ledger.admission import AdmissionLimits
from pipeline.ledger.claim import ClaimedRequest
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.messages import QueueMessage
from pipeline.ledger.store import connect, connect_async
from pipeline.ledger.worker_ledger import LogWrite, WorkerLedger
from pipeline.protocol.request import Priority, Request
from pipeline.protocol.sampling import SamplingParams

QUEUE = "prefill.m"


@dataclass
class Line:
    """One worker with few places, and whatever is sent to it in order."""

    client: Any
    gateway: ClientLedger
    ledger: WorkerLedger
    sent: list[QueueMessage] = field(default_factory=list)

    def beat(self, places: int, **fields: object) -> None:
        state = {"queues": [QUEUE, "decode.m.a"], "capacity": places, "role": "both"}
        self.ledger.beat("w1", 60.0, json.dumps(state | fields))

    async def submit(
        self, name: str, tenant: str = "t1", num_prompt: int = 4, max_tokens: int = 4, **more: Any
    ) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Request(name, "m", [1] * num_prompt, sampling, tenant=tenant, **more)
        self.sent += await self.gateway.submit(request, QUEUE, "gateway:g")

    def start(self, name: str) -> None:
        assert isinstance(self.ledger.claim(name, "w1", (QUEUE,)), ClaimedRequest)

    def end(self, name: str, num_tokens: int = 1) -> None:
        write = LogWrite(name, 1, 0, b"abcd" * num_tokens, "stop", 0)
        self.sent += self.ledger.write_step("w1", [write]).messages

    def run_all(self) -> list[str]:
        """Run whatever is sent, one after another; the order."""
        order = []
        while self.sent:
            name = self.sent.pop(0).request_id
            self.start(name)
            self.end(name)
            order.append(name)
        return order


@pytest.fixture
async def line(redis_url: str) -> AsyncIterator[Line]:
    client, connection = connect(redis_url), connect_async(redis_url)
    gateway = ClientLedger(connection, limits=AdmissionLimits(10_000), retention_s=60)
    yield Line(client, gateway, WorkerLedger(client, max_attempts=3, retention_s=60))
    await connection.aclose()
    client.close()


async def test_an_open_window_lets_a_request_pass_at_once(line: Line) -> None:
    line.beat(8)
    await line.submit("r1")

    assert line.sent == [QueueMessage("r1", QUEUE, Priority.NORMAL)]
    assert not line.client.exists("held:m", "held_queues:m")


async def test_only_what_fits_and_one_more_is_sent(line: Line) -> None:
    line.beat(1)
    for number in range(10):
        await line.submit(f"r{number}")

    assert [message.request_id for message in line.sent] == ["r0", "r1"]
    line.start("r0")
    assert line.ledger.release() == []
    line.end("r0")
    assert [message.request_id for message in line.sent] == ["r0", "r1", "r2"]


async def test_c085_a_flood_of_one_tenant_does_not_keep_another_waiting(line: Line) -> None:
    line.beat(1)
    for number in range(100):
        await line.submit(f"a{number}", "t1")
    for number in range(5):
        await line.submit(f"b{number}", "t2")

    order = line.run_all()

    assert len(order) == 105
    for rank in range(5):
        before = order[: order.index(f"b{rank}")]
        assert sum(name.startswith("a") for name in before) <= 3 * (rank + 1)


async def test_shares_are_of_tokens_not_of_requests(line: Line) -> None:
    line.beat(1)
    for number in range(60):
        await line.submit(f"big{number}", "t1", num_prompt=40, max_tokens=1)
        await line.submit(f"small{number}", "t2", num_prompt=9, max_tokens=1)

    order = line.run_all()[4:54]

    num_big = sum(name.startswith("big") for name in order)
    assert 8 <= num_big <= 12, "41 tokens against 10: one of five"


async def test_output_that_did_not_come_is_given_back(line: Line) -> None:
    line.beat(1)
    for number in range(60):
        # Both get one token of output; t1 had asked for many.
        await line.submit(f"many{number}", "t1", max_tokens=200)
        await line.submit(f"few{number}", "t2", max_tokens=1)

    order = line.run_all()[4:44]

    assert 14 <= sum(name.startswith("many") for name in order) <= 26


async def test_a_tenant_that_was_away_has_saved_nothing_up(line: Line) -> None:
    line.beat(1)
    for number in range(40):
        await line.submit(f"a{number}", "t1")
    await line.submit("x", "t3")
    for _ in range(20):
        name = line.sent.pop(0).request_id
        line.start(name)
        line.end(name)
    for number in range(20):
        await line.submit(f"b{number}", "t2")

    order = line.run_all()[2:12]

    assert 4 <= sum(name.startswith("b") for name in order) <= 6


async def test_the_higher_priority_goes_first_and_batches_leave_places_free(line: Line) -> None:
    line.beat(8)
    await line.submit("n")
    assert line.run_all() == ["n"]
    for number in range(20):
        await line.submit(f"b{number}", priority=Priority.BATCH)
    num_batch = len(line.sent)
    for number in range(10):
        await line.submit(f"n{number}")
        await line.submit(f"h{number}", priority=Priority.HIGH)

    assert num_batch == 8, "6 of 8 places, and 2 to spare"
    rest = [message.request_id[0] for message in line.sent[num_batch:]]
    assert "b" not in rest
    for name in [message.request_id for message in line.sent[:num_batch]]:
        line.start(name)
        line.end(name)
    assert line.sent[-1].request_id.startswith("h")


async def test_batches_fill_more_while_nobody_else_asks(line: Line) -> None:
    line.beat(64)
    for number in range(80):
        await line.submit(f"b{number}", priority=Priority.BATCH)
    num_alone = len(line.sent)
    await line.submit("n")
    is_sent = line.sent[-1].request_id == "n"
    line.run_all()
    for number in range(80):
        await line.submit(f"c{number}", priority=Priority.BATCH)

    assert num_alone == 61, "9 of 10 places, and 4 to spare"
    assert is_sent
    assert len(line.sent) == 52, "3 of 4 places, and 4 to spare"


async def test_a_priority_that_was_passed_over_for_long_gets_its_turn(line: Line) -> None:
    line.beat(1)
    for number in range(4):
        await line.submit(f"n{number}")
    await line.submit("batch1", priority=Priority.BATCH)
    await line.submit("batch2", priority=Priority.BATCH)
    line.client.hincrby(f"turns:{QUEUE}", int(Priority.BATCH), -25_000)

    order = [name for name in line.run_all() if not name.startswith("h")]

    assert order.index("batch1") < order.index("n3")
    assert order.index("batch2") > order.index("n3"), "one turn, not the whole line"


async def test_prompts_are_sent_by_tokens_not_by_places(line: Line) -> None:
    line.beat(64, max_ahead_tokens=100)
    for number in range(10):
        await line.submit(f"r{number}", num_prompt=60)
    assert [message.request_id for message in line.sent] == ["r0", "r1"]
    line.start("r0")
    write = LogWrite("r0", 1, 0, b"abcd", "", 0)

    assert line.ledger.write_step("w1", [write]).messages == [QueueMessage("r2", QUEUE, 3)]


async def test_a_cancelled_request_leaves_its_line(line: Line) -> None:
    line.beat(1)
    for number in range(5):
        await line.submit(f"r{number}")
    await line.gateway.cancel("r3")
    await line.gateway.cancel("r0")
    line.sent = line.sent[1:] + line.ledger.release()

    assert line.run_all() == ["r1", "r2", "r4"]
    left = {key.decode().partition(":")[0] for key in line.client.scan_iter()}
    assert left <= {"request", "tokens", "counters", "queues", "slots", "lease", "workers",
                    "frontier", "pace_ms", "asked_lately"}  # fmt: skip


async def test_what_waits_for_no_worker_is_held_again_in_the_next_queue(line: Line) -> None:
    line.beat(1)
    for number in range(3):
        await line.submit(f"r{number}")
    for number in range(3):
        line.ledger.place(f"r{number}", QUEUE, "decode.m.a")

    assert line.client.scard("held:m") == 1
    assert line.client.zcard("waiting:decode.m.a") == 3
    assert line.client.zcard("released:decode.m.a:3") == 2


async def test_a_draining_worker_gets_nothing(line: Line) -> None:
    line.beat(4, is_draining=True)
    await line.submit("r1")

    assert line.sent == []
    line.beat(4)
    assert [message.request_id for message in line.ledger.release()] == ["r1"]


async def test_who_goes_next_is_told_in_the_order_in_which_they_go(line: Line) -> None:
    line.beat(1)
    for name, tenant in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("a4", "a"), ("b1", "b")):
        await line.submit(name, tenant)
    await line.submit("high", "b", priority=Priority.HIGH)
    line.start("a1")

    def told(count: int) -> list[str]:
        return [each.request_id for each in line.ledger.next_in_line([QUEUE, "decode.a"], count)]

    assert told(9) == ["high", "a2", "a3", "b1", "a4"], "high and a2 are released, the others held"
    assert told(2) == ["high", "a2"]
    (first,) = line.ledger.next_in_line([QUEUE], 1)
    assert (first.prompt_tokens, first.sampling.max_tokens) == ([1] * 4, 4)
    known = line.ledger.next_in_line([QUEUE], 9, {"high", "a3"})
    assert [(each.request_id, len(each.prompt_tokens)) for each in known] == [
        *(("high", 0), ("a2", 4), ("a3", 0), ("b1", 4), ("a4", 4)),
    ]
    await line.gateway.cancel("high")
    assert told(9) == ["a2", "a3", "b1", "a4"]
    assert line.ledger.next_in_line(["decode.a"], 9) == []
    line.client.hset("request:a3", "sampling", '{"of": "another build"}')
    assert told(9) == ["a2", "b1", "a4"]


async def test_a_beat_tells_a_workers_share_of_the_prompts_that_wait(line: Line) -> None:
    nobody = dict.fromkeys(Priority, 0)
    state = {"queues": [QUEUE, "decode.m.a"], "capacity": 2, "role": "both"}
    assert line.ledger.beat("w1", 60.0, json.dumps(state)).waiting == nobody
    for number in range(7):
        await line.submit(f"r{number}")
    for number in range(3):
        await line.submit(f"b{number}", priority=Priority.BATCH)
    assert 0 < len(line.sent) < 7, "some are released, some held"

    alone = line.ledger.beat("w1", 60.0, json.dumps(state)).waiting
    line.start("r0")
    others = {"queues": [QUEUE], "capacity": 2, "role": "prefill"}
    shared = line.ledger.beat("w2", 60.0, json.dumps(others)).waiting
    decoder = {"queues": ["decode.m.b"], "capacity": 2, "role": "decode"}

    assert alone == nobody | {Priority.NORMAL: 7, Priority.BATCH: 3}
    assert shared == nobody | {Priority.NORMAL: 3, Priority.BATCH: 2}
    assert line.ledger.beat("w3", 60.0, json.dumps(decoder)).waiting == {}
