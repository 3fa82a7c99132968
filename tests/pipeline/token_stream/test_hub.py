"""Followers get every token once and in order, whatever happens to the bell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest

from pipeline.errors import RequestUnknown, StoreUnavailable
from pipeline.ledger.admission import AdmissionLimits
from pipeline.ledger.claim import ClaimedRequest
from pipeline.ledger.client_ledger import ClientLedger, Replay
from pipeline.ledger.store import connect, connect_async
from pipeline.ledger.worker_ledger import LogWrite, WorkerLedger
from pipeline.protocol.failure import Ending, FinishReason
from pipeline.protocol.request import Request
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.stream import StreamEnded, TokensArrived
from pipeline.protocol.tokens import TokenRecord, pack_records
from pipeline.token_stream.hub import MAX_BUFFERED_MESSAGES, TokenHub


@dataclass
class Line:
    """A hub, and a worker that writes one request's tokens: token i is 100 + i."""

    hub: TokenHub
    ledger: ClientLedger
    worker: WorkerLedger
    client: Any
    num_written: int = 0
    got: list[int] = field(default_factory=list)
    ended: StreamEnded | None = None

    async def submit(self, num_logprobs: int | None = None) -> None:
        sampling = SamplingParams(max_tokens=500, num_logprobs=num_logprobs)
        request = Request("r1", "m", [1, 2, 3], sampling)
        await self.ledger.submit(request, "prefill.m", self.hub.channel)
        assert isinstance(self.worker.claim("r1", "w1", ("prefill.m",)), ClaimedRequest)

    def write(self, count: int = 1, ending: str = "") -> None:
        records = [TokenRecord(100 + self.num_written + i) for i in range(count)]
        data = pack_records(records, None)
        self.worker.write_step("w1", [LogWrite("r1", 1, 4 * self.num_written, data, ending, 2)])
        self.num_written += count

    async def follow(self, first_index: int = 0) -> None:
        async for event in self.hub.follow("r1", first_index=first_index, num_logprobs=None):
            if isinstance(event, TokensArrived):
                assert event.index == first_index + len(self.got)
                self.got += [record.token_id for record in event.records]
            else:
                self.ended = event

    async def until_got(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.got) < count:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.005)

    def expected(self, first: int = 0) -> list[int]:
        return [100 + i for i in range(first, self.num_written)]


@pytest.fixture
async def line(redis_url: str) -> AsyncIterator[Line]:
    client = connect(redis_url)
    connection, hub_connection = connect_async(redis_url), connect_async(redis_url, num_retries=0)
    ledger = ClientLedger(connection, limits=AdmissionLimits(9), retention_s=60)
    hub = TokenHub(hub_connection, ledger, "g1", give_up_after_s=60)
    worker = WorkerLedger(client, max_attempts=3, retention_s=60)
    await hub.start()
    yield Line(hub, ledger, worker, client)
    await hub.close()
    await connection.aclose()
    await hub_connection.aclose()
    client.close()


async def test_a_follower_gets_what_was_written_before_and_after_it_came(line: Line) -> None:
    await line.submit()
    line.write(3)
    following = asyncio.create_task(line.follow())
    await line.until_got(3)
    line.write(2)
    line.write(1, ending="length")
    await asyncio.wait_for(following, 5)

    assert line.got == line.expected()
    assert line.ended is not None
    assert line.ended.ending.encode() == "length"
    assert (line.ended.usage.prompt_tokens, line.ended.usage.completion_tokens) == (3, 6)
    assert line.ended.usage.cached_tokens == 2


async def test_a_follower_can_begin_anywhere_also_after_the_end(line: Line) -> None:
    await line.submit()
    line.write(9, ending="stop")
    await line.follow(first_index=4)

    assert line.got == line.expected(4)
    assert line.ended is not None
    assert line.ended.usage.completion_tokens == 9


@pytest.mark.parametrize("data", [b"\xff\xff", msgpack.packb(5), msgpack.packb([[b"r1", 0]])])
async def test_a_message_that_cannot_be_read_makes_nobody_deaf(line: Line, data: bytes) -> None:
    await line.submit()
    following = asyncio.create_task(line.follow())
    line.write(1)
    await line.until_got(1)
    line.client.publish(line.hub.channel, data)
    line.write(1)
    await line.until_got(2)
    line.write(1, ending="stop")
    await asyncio.wait_for(following, 10)

    assert line.got == line.expected()
    assert line.client.pubsub_numsub(line.hub.channel)[0][1] == 1
    assert line.hub.num_reconnects == 0


async def test_a_fault_of_the_library_is_taken_like_a_lost_connection(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    await line.submit()
    following = asyncio.create_task(line.follow())
    line.write(1)
    await line.until_got(1)
    pubsub, faults = line.hub._client.pubsub, [RuntimeError("not of Redis")]

    def subscribe_in_the_end(**options: Any) -> Any:
        if faults:
            raise faults.pop()
        return pubsub(**options)

    monkeypatch.setattr(line.hub._client, "pubsub", subscribe_in_the_end)
    line.client.client_kill_filter(_type="pubsub")
    async with asyncio.timeout(10):
        while faults or line.client.pubsub_numsub(line.hub.channel)[0][1] != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    line.write(1, ending="stop")
    await asyncio.wait_for(following, 10)
    assert line.got == line.expected()


async def test_a_cut_subscription_costs_no_token(line: Line) -> None:
    await line.submit()
    following = asyncio.create_task(line.follow())
    line.write(1)
    await line.until_got(1)
    for _ in range(5):
        line.write(2)
        line.client.client_kill_filter(_type="pubsub")
        await asyncio.sleep(0.05)
    line.write(1, ending="length")
    await asyncio.wait_for(following, 10)

    assert line.got == line.expected()
    assert line.hub.num_reconnects > 0


async def test_a_gap_is_filled_from_the_log(line: Line) -> None:
    await line.submit()
    following = asyncio.create_task(line.follow())
    line.write(1)
    await line.until_got(1)
    # One message that nobody hears, as when pub/sub drops it.
    watchers = line.client.hget("request:r1", "watchers")
    line.client.hset("request:r1", "watchers", "")
    line.write(4)
    line.client.hset("request:r1", "watchers", watchers)
    line.write(1, ending="length")
    await asyncio.wait_for(following, 10)

    assert line.got == line.expected()


async def test_a_slow_reader_costs_bounded_memory_and_no_token(line: Line) -> None:
    await line.submit()
    events = line.hub.follow("r1", first_index=0, num_logprobs=None)
    line.write(1)
    first = await anext(events)
    for _ in range(MAX_BUFFERED_MESSAGES + 50):
        line.write(1)
    line.write(1, ending="length")
    await asyncio.sleep(0.2)

    got = [record.token_id for record in first.records] if isinstance(first, TokensArrived) else []
    async for event in events:
        if isinstance(event, TokensArrived):
            got += [record.token_id for record in event.records]
    assert got == line.expected()


async def test_many_followers_share_one_subscription(line: Line, redis_url: str) -> None:
    await line.submit()
    before = len(line.client.client_list(_type="pubsub"))
    others = [Line(line.hub, line.ledger, line.worker, line.client) for _ in range(50)]
    following = [asyncio.create_task(other.follow()) for other in others]
    line.write(3)
    line.write(1, ending="length")
    await asyncio.wait_for(asyncio.gather(*following), 10)

    assert all(other.got == line.expected() for other in others)
    assert len(line.client.client_list(_type="pubsub")) == before
    assert line.hub.num_streams == 0


async def test_another_gateway_hears_of_a_request_it_did_not_submit(
    line: Line, redis_url: str
) -> None:
    await line.submit()
    connection = connect_async(redis_url)
    other = TokenHub(connection, line.ledger, "g2", give_up_after_s=60)
    await other.start()
    elsewhere = Line(other, line.ledger, line.worker, line.client)
    here = asyncio.create_task(line.follow())
    there = asyncio.create_task(elsewhere.follow())
    line.write(2)
    await elsewhere.until_got(2)
    line.write(2, ending="length")
    async with asyncio.timeout(2):  # well under the 3 s after which silence makes it look
        await asyncio.gather(here, there)

    assert elsewhere.got == line.got == line.expected()
    await other.close()
    await connection.aclose()


async def test_following_an_unknown_request_is_refused(line: Line) -> None:
    with pytest.raises(RequestUnknown):
        await anext(line.hub.follow("nobody", first_index=0, num_logprobs=None))


async def test_log_probabilities_travel_with_their_tokens(line: Line) -> None:
    await line.submit(num_logprobs=1)
    record = TokenRecord(7, -0.5, ((7, -0.5),))
    data = pack_records([record, record], 1)
    line.worker.write_step("w1", [LogWrite("r1", 1, 0, data, "stop", 0)])

    events = [e async for e in line.hub.follow("r1", first_index=1, num_logprobs=1)]
    assert events[0] == TokensArrived(1, [record])


@pytest.mark.parametrize("num_turns", range(12))
async def test_a_follower_that_is_cancelled_ends_at_once(line: Line, num_turns: int) -> None:
    await line.submit()
    following = asyncio.create_task(line.follow())
    for _ in range(num_turns):
        await asyncio.sleep(0)
    following.cancel()
    _, alive = await asyncio.wait([following], timeout=0.5)

    assert not alive
    assert line.hub.num_streams == 0


@pytest.mark.parametrize(
    "message", [b"", b"nonsense", b"\x91\x91\x05", b"\x93\x01\x02\x03", b"\xc1"]
)
async def test_a_message_that_makes_no_sense_costs_nobody_the_bell(
    line: Line, message: bytes
) -> None:
    await line.submit()
    following = asyncio.create_task(line.follow())
    line.write(1)
    await line.until_got(1)
    line.client.publish("gateway:g1", message)
    line.write(2)
    await line.until_got(3)
    # The subscription that heard the nonsense is still the one that hears of the tokens.
    assert line.hub.num_reconnects == 0
    line.write(1, ending="stop")
    await asyncio.wait_for(following, 2)

    assert line.got == line.expected()


class Fickle(ClientLedger):
    """Can be away."""

    is_away = False
    num_refused = 0

    async def watch(self, request_id: str, channel: str, offset_bytes: int) -> Replay | None:
        if self.is_away:
            self.num_refused += 1
            raise StoreUnavailable("away")
        return await super().watch(request_id, channel, offset_bytes)


async def test_a_long_stream_has_as_much_patience_with_redis_as_a_short_one(
    line: Line, redis_url: str
) -> None:
    patience_s = 1.5
    connection, bell = connect_async(redis_url), connect_async(redis_url, num_retries=0)
    ledger = Fickle(connection, limits=AdmissionLimits(9), retention_s=60)
    hub = TokenHub(bell, ledger, "g2", give_up_after_s=patience_s)
    await hub.start()
    lasting = Line(hub, ledger, line.worker, line.client)
    await lasting.submit()
    following = asyncio.create_task(lasting.follow())
    clock = asyncio.get_running_loop().time
    until_s = clock() + patience_s + 0.1
    while clock() < until_s:
        lasting.write(1)
        await lasting.until_got(lasting.num_written)
    ledger.is_away = True
    line.client.client_kill_filter(_type="pubsub")
    async with asyncio.timeout(10):
        while not ledger.num_refused:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)
    ledger.is_away = False
    lasting.write(1, ending="stop")
    await asyncio.wait_for(following, 10)
    await hub.close()
    await connection.aclose()
    await bell.aclose()

    assert lasting.ended is not None
    assert lasting.ended.ending == Ending(reason=FinishReason.STOP)
    assert lasting.got == lasting.expected()
