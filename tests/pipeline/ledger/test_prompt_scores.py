"""Scores of a prompt in the ledger: written by the owner only, read by anyone, gone in time."""

from __future__ import annotations

from collections.abc import Callable

import redis

from pipeline.ledger.claim import ClaimedRequest
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.keys import scores_key
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.protocol.request import Request
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.tokens import TokenRecord, pack_records

MakeRequest = Callable[..., Request]
SAMPLING = SamplingParams(max_tokens=0, echo=True, num_logprobs=1)
SCORES = pack_records([TokenRecord(2, -1.0, ((9, -0.5),)), TokenRecord(3, -2.0, ((8, -0.1),))], 1)


async def submitted(client_ledger: ClientLedger, ledger: WorkerLedger, request: Request) -> None:
    await client_ledger.submit(request, "prefill.m", "gateway:g")
    assert isinstance(ledger.claim("r1", "w1", ("prefill.m",)), ClaimedRequest)


async def test_scores_are_kept_to_the_end_of_deadline_and_retention(
    client: redis.Redis,
    client_ledger: ClientLedger,
    worker_ledger: WorkerLedger,
    make_request: MakeRequest,
) -> None:
    await submitted(client_ledger, worker_ledger, make_request(sampling=SAMPLING))
    assert await client_ledger.scores("r1") is None

    assert worker_ledger.write_scores("r1", "w1", 1, SCORES)
    assert worker_ledger.write_scores("r1", "w1", 1, SCORES)

    assert await client_ledger.scores("r1") == SCORES
    assert 650 < int(client.ttl(scores_key("r1"))) <= 660


async def test_a_prompt_of_one_token_has_no_scores_and_says_so(
    client_ledger: ClientLedger, worker_ledger: WorkerLedger, make_request: MakeRequest
) -> None:
    await submitted(client_ledger, worker_ledger, make_request(sampling=SAMPLING))
    assert worker_ledger.write_scores("r1", "w1", 1, b"")
    assert await client_ledger.scores("r1") == b""


async def test_only_the_owner_of_the_attempt_writes_scores(
    client_ledger: ClientLedger, worker_ledger: WorkerLedger, make_request: MakeRequest
) -> None:
    await submitted(client_ledger, worker_ledger, make_request(sampling=SAMPLING))
    assert not worker_ledger.write_scores("r1", "w2", 1, SCORES)
    assert not worker_ledger.write_scores("r1", "w1", 2, SCORES)
    assert worker_ledger.give_back("r1", "w1", "prefill.m") is not None
    assert not worker_ledger.write_scores("r1", "w1", 1, SCORES)
    assert await client_ledger.scores("r1") is None


async def test_options_left_at_their_defaults_do_not_travel(
    client: redis.Redis, client_ledger: ClientLedger, make_request: MakeRequest
) -> None:
    await client_ledger.submit(make_request(), "prefill.m", "gateway:g")
    assert client.hget("request:r1", "sampling") == b'{"max_tokens":8}'
