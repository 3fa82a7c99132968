"""Requests in the ledger: owned by one, written by its owner only, never forgotten."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from pipeline.errors import Overloaded, RequestExists, StoreUnavailable
from pipeline.ledger.claim import ClaimedRequest, ClaimRefusal, ClaimUnreadable, TailHint
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.messages import QueueMessage
from pipeline.ledger.store import connect
from pipeline.ledger.worker_ledger import LogWrite, StepReply, WorkerLedger
from pipeline.protocol.failure import Ending, FailureCode, FinishReason
from pipeline.protocol.request import Request, RequestState
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.tokens import TokenRecord, pack_records

MakeRequest = Callable[..., Request]


def write(
    ledger: WorkerLedger, worker: str, index: int, token: int, *, attempt: int = 1, ending: str = ""
) -> StepReply:
    data = pack_records([TokenRecord(token)], None)
    return ledger.write_step(worker, [LogWrite("r1", attempt, 4 * index, data, ending, 0)])


def claim(ledger: WorkerLedger, worker: str = "w1", queue: str = "prefill.m") -> ClaimedRequest:
    claimed = ledger.claim("r1", worker, (queue,))
    assert isinstance(claimed, ClaimedRequest)
    return claimed


async def test_a_claim_returns_the_request_as_it_was_submitted(
    client_ledger: ClientLedger, worker_ledger: WorkerLedger, make_request: MakeRequest
) -> None:
    request = make_request(sampling=SamplingParams(max_tokens=8, stop=("x",), num_logprobs=2))
    await client_ledger.submit(request, "prefill.m", "gateway:g")

    claimed = claim(worker_ledger)

    assert claimed.prompt_tokens == [1, 2, 3]
    assert claimed.sampling == request.sampling
    assert (claimed.attempt, claimed.tenant, claimed.tenant_salt) == (1, "t1", "salt")
    assert 595 < claimed.remaining_s <= 600


async def test_only_one_worker_gets_a_request(
    client_ledger: ClientLedger, worker_ledger: WorkerLedger, make_request: MakeRequest
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")
    claim(worker_ledger)

    assert worker_ledger.claim("r1", "w2", ("prefill.m",)) is ClaimRefusal.TAKEN


async def test_a_worker_that_missed_the_answer_may_claim_again(
    client_ledger: ClientLedger, worker_ledger: WorkerLedger, make_request: MakeRequest
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")

    assert claim(worker_ledger).prompt_tokens == claim(worker_ledger).prompt_tokens


async def test_a_message_for_another_queue_leads_to_nothing(
    client_ledger: ClientLedger, worker_ledger: WorkerLedger, make_request: MakeRequest
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")

    assert worker_ledger.claim("r1", "w1", ("decode.m.a",)) is ClaimRefusal.MOVED
    assert worker_ledger.claim("nobody", "w1", ("prefill.m",)) is ClaimRefusal.GONE


async def test_an_id_is_used_once(client_ledger: ClientLedger, make_request: MakeRequest) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")

    with pytest.raises(RequestExists):
        await client_ledger.submit(make_request(), "prefill.m", "gateway:g")


async def test_the_waiting_line_is_bounded(
    client_ledger: ClientLedger, make_request: MakeRequest
) -> None:
    for number in range(3):
        await client_ledger.submit(make_request(f"r{number}"), "prefill.m", "gateway:g")

    with pytest.raises(Overloaded) as refused:
        await client_ledger.submit(make_request("r4"), "prefill.m", "gateway:g")
    assert 1 <= refused.value.retry_after_s <= 60


async def test_a_write_of_a_fenced_attempt_changes_nothing(
    client_ledger: ClientLedger,
    worker_ledger: WorkerLedger,
    client: redis.Redis,
    make_request: MakeRequest,
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")
    claim(worker_ledger)
    write(worker_ledger, "w1", 0, 65)
    # No lease of w1 exists: it counts as lost.
    assert worker_ledger.requeue_lost("r1", "w1", "prefill.m") is not None
    second = claim(worker_ledger, "w2")

    reply = write(worker_ledger, "w1", 1, 99)

    assert second.attempt == 2
    assert [record.token_id for record in second.logged] == [65]
    assert reply.stale == [("r1", 1)]
    assert client.strlen("tokens:r1") == 4


async def test_writing_a_step_twice_leaves_one_token(
    client_ledger: ClientLedger,
    worker_ledger: WorkerLedger,
    client: redis.Redis,
    make_request: MakeRequest,
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")
    claim(worker_ledger)
    for _ in range(2):
        write(worker_ledger, "w1", 0, 65)

    assert client.strlen("tokens:r1") == 4


async def test_a_log_that_lost_its_end_is_asked_for_again(
    client_ledger: ClientLedger,
    worker_ledger: WorkerLedger,
    client: redis.Redis,
    make_request: MakeRequest,
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")
    claim(worker_ledger)
    write(worker_ledger, "w1", 0, 65)
    client.delete("tokens:r1")

    assert write(worker_ledger, "w1", 1, 66).short == ["r1"]


async def test_the_lease_protects_a_living_worker(
    client_ledger: ClientLedger, worker_ledger: WorkerLedger, make_request: MakeRequest
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")
    claim(worker_ledger)
    worker_ledger.beat("w1", 4.0, "{}")

    assert worker_ledger.requeue_lost("r1", "w1", "prefill.m") is None
    assert write(worker_ledger, "w1", 0, 65).stale == []


async def test_too_many_lost_attempts_end_in_the_dead_letters(
    client_ledger: ClientLedger,
    worker_ledger: WorkerLedger,
    client: redis.Redis,
    make_request: MakeRequest,
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")
    for worker in ("w1", "w2"):
        claim(worker_ledger, worker)
        worker_ledger.requeue_lost("r1", worker, "prefill.m")

    status = await client_ledger.status("r1")
    assert status is not None
    assert status.ending == Ending(failure=FailureCode.WORKER_LOST)
    assert client.lrange("dead_letters", 0, -1) == [b"r1"]
    assert worker_ledger.claim("r1", "w3", ("prefill.m",)) is ClaimRefusal.FINAL


async def test_giving_back_is_not_a_loss(
    client_ledger: ClientLedger, worker_ledger: WorkerLedger, make_request: MakeRequest
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")
    for worker in ("w1", "w2", "w3"):
        claim(worker_ledger, worker)
        assert worker_ledger.give_back("r1", worker, "prefill.m") is not None

    assert claim(worker_ledger, "w4").attempt == 4


async def test_a_hand_over_passes_log_and_tail_on(
    client_ledger: ClientLedger, worker_ledger: WorkerLedger, make_request: MakeRequest
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")
    claim(worker_ledger)
    write(worker_ledger, "w1", 0, 65)

    sent = worker_ledger.hand_over("r1", "w1", 1, "decode.m.a", TailHint(1, 3))
    assert sent == [QueueMessage("r1", "decode.m.a", 3)]
    assert worker_ledger.hand_over("r1", "w1", 1, "decode.m.a", None) is None

    decoding = claim(worker_ledger, "w2", "decode.m.a")
    assert [record.token_id for record in decoding.logged] == [65]
    assert decoding.tail == TailHint(1, 3)
    assert write(worker_ledger, "w1", 1, 66).stale == [("r1", 1)]


async def test_a_claim_says_who_had_the_request_before(
    client_ledger: ClientLedger, worker_ledger: WorkerLedger, make_request: MakeRequest
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")
    assert claim(worker_ledger, "prefill-0@a#1").came_from == ""
    worker_ledger.hand_over("r1", "prefill-0@a#1", 1, "decode.m.b", None)

    handed_over = claim(worker_ledger, "decode-0@b#2", "decode.m.b")
    asked_again = claim(worker_ledger, "decode-0@b#2", "decode.m.b")

    assert [handed_over.came_from, asked_again.came_from] == ["prefill-0@a#1"] * 2


async def test_an_ending_takes_the_prompt_and_all_lines_away(
    client_ledger: ClientLedger,
    worker_ledger: WorkerLedger,
    client: redis.Redis,
    make_request: MakeRequest,
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")
    claim(worker_ledger)
    write(worker_ledger, "w1", 0, 65, ending="stop")

    status = await client_ledger.status("r1")
    assert status is not None
    assert status.state is RequestState.FINISHED
    assert status.usage.completion_tokens == 1
    assert not client.hexists("request:r1", "prompt")
    assert not client.zcard("deadlines")
    assert not client.scard("running:w1")
    assert 0 < int(client.ttl("request:r1")) <= 60


async def test_what_has_ended_stays_as_it_is_whatever_its_last_worker_says(
    client: redis.Redis,
    client_ledger: ClientLedger,
    worker_ledger: WorkerLedger,
    make_request: MakeRequest,
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")
    claim(worker_ledger)
    write(worker_ledger, "w1", 0, 7, ending="stop")

    again = write(worker_ledger, "w1", 0, 7, ending="stop")
    more = write(worker_ledger, "w1", 1, 8)

    assert (again.stale, again.short) == ([], [])
    assert more.stale == [("r1", 1)], "it goes on, and must not"
    assert worker_ledger.hand_over("r1", "w1", 1, "decode.m.a", None) is None
    assert client.get("tokens:r1") == pack_records([TokenRecord(7)], None)
    assert client.hget("request:r1", "state") == b"finished"
    assert client.ttl("tokens:r1") <= 60, "it goes with its retention"
    assert not client.exists("deadlines", "waiting:decode.m.a")


async def test_cancelling_a_queued_request_ends_it_for_good(
    client_ledger: ClientLedger, worker_ledger: WorkerLedger, make_request: MakeRequest
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")

    assert await client_ledger.cancel("r1")
    assert worker_ledger.claim("r1", "w1", ("prefill.m",)) is ClaimRefusal.FINAL
    assert not await client_ledger.cancel("r1")
    assert not await client_ledger.cancel("nobody")


async def test_cancelling_a_running_request_reaches_its_worker_in_step_and_beat(
    client_ledger: ClientLedger, worker_ledger: WorkerLedger, make_request: MakeRequest
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")
    claim(worker_ledger)
    assert await client_ledger.cancel("r1")
    assert write(worker_ledger, "w1", 0, 65).cancelled == ["r1"]
    assert await client_ledger.cancel("r1")
    assert worker_ledger.beat("w1", 4.0, "{}")[1] == ["r1"]


async def test_a_worker_that_missed_a_cancellation_hears_of_it_with_each_step(
    client_ledger: ClientLedger, worker_ledger: WorkerLedger, make_request: MakeRequest
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")
    claim(worker_ledger)
    await client_ledger.cancel("r1")
    assert worker_ledger.beat("w1", 4.0, "{}").cancelled == ["r1"], "and the answer gets lost"

    assert write(worker_ledger, "w1", 0, 65).cancelled == ["r1"]
    assert write(worker_ledger, "w1", 1, 66).cancelled == ["r1"]
    assert write(worker_ledger, "w1", 2, 67, ending="cancelled").cancelled == []


async def test_a_request_of_a_newer_build_is_failed_at_once_and_by_its_owner_only(
    client_ledger: ClientLedger,
    worker_ledger: WorkerLedger,
    make_request: MakeRequest,
    client: redis.Redis,
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")
    client.hset("request:r1", "sampling", '{"max_tokens": 8, "stop": ["SECRET"], "of_2031": 1}')
    with pytest.raises(ClaimUnreadable) as unreadable:
        worker_ledger.claim("r1", "w1", ("prefill.m",))
    cause = unreadable.value.__cause__
    assert "SECRET" not in f"{cause}", "not for the log"

    worker_ledger.end_unreadable("w2", unreadable.value)
    status = await client_ledger.status("r1")
    assert status is not None
    assert status.state is RequestState.RUNNING, "another may not end it; what is known is shown"
    worker_ledger.end_unreadable("w1", unreadable.value)
    status = await client_ledger.status("r1")
    assert status is not None
    assert status.ending == Ending(failure=FailureCode.INTERNAL_ERROR)
    assert status.sampling == SamplingParams(max_tokens=8, stop=("SECRET",))


async def test_a_cancelled_request_of_a_lost_worker_is_not_run_again(
    client_ledger: ClientLedger, worker_ledger: WorkerLedger, make_request: MakeRequest
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")
    claim(worker_ledger)
    await client_ledger.cancel("r1")

    assert worker_ledger.requeue_lost("r1", "w1", "prefill.m") is None
    status = await client_ledger.status("r1")
    assert status is not None
    assert status.ending == Ending(reason=FinishReason.CANCELLED)


async def test_a_queue_deadline_fails_only_what_still_waits(
    client_ledger: ClientLedger,
    worker_ledger: WorkerLedger,
    client: redis.Redis,
    make_request: MakeRequest,
) -> None:
    await client_ledger.submit(make_request("r1"), "prefill.m", "gateway:g")
    await client_ledger.submit(make_request("r2"), "prefill.m", "gateway:g")
    client.zadd("deadlines", {"r1": 1})
    client.hset("request:r1", "queue_deadline_ms", 0)

    assert not worker_ledger.expire("r2", FailureCode.QUEUE_TIMEOUT)
    assert worker_ledger.expire("r1", FailureCode.QUEUE_TIMEOUT)
    status = await client_ledger.status("r1")
    assert status is not None
    assert status.ending == Ending(failure=FailureCode.QUEUE_TIMEOUT)


async def test_a_request_moves_between_queues_once(
    client_ledger: ClientLedger, worker_ledger: WorkerLedger, make_request: MakeRequest
) -> None:
    await client_ledger.submit(make_request(), "unplaced.m", "gateway:g")

    assert worker_ledger.place("r1", "unplaced.m", "decode.m.a") == []
    assert worker_ledger.place("r1", "unplaced.m", "decode.m.b") is None
    claim(worker_ledger, "w1", "decode.m.a")


def test_a_store_that_is_away_is_said_so() -> None:
    ledger = WorkerLedger(connect("redis://127.0.0.1:1/0"), max_attempts=1, retention_s=1)

    with pytest.raises(StoreUnavailable):
        ledger.claim("r1", "w1", ("prefill.m",))
