"""Whom to tell of a job's end: each is taken by one gateway at a time, until it is told or given up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from pydantic import SecretStr

from pipeline.ledger.store import connect_async
from pipeline.ledger.webhooks import Webhook, WebhookQueue

JOB = "job-1"
LEASE_MS = 60_000
HOOK = Webhook(url="https://example.com/", secret=SecretStr("s" * 16))


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[WebhookQueue]:
    connection = connect_async(redis_url)
    yield WebhookQueue(connection)
    await connection.aclose()


def put_due(client: Any, webhook: str) -> None:
    """A job that has ended, or a webhook whose lease is over."""
    fields = {"webhook": webhook, "state": "finished", "ended_ms": 5000}
    client.hset(f"request:{JOB}", mapping=fields)
    client.expire(f"request:{JOB}", 60)
    client.zadd("webhooks", {JOB: 1})


async def test_one_that_is_taken_is_nobody_elses_and_each_taking_is_a_try(
    queue: WebhookQueue, client: Any
) -> None:
    put_due(client, HOOK.encode())
    (due,) = await queue.take(8, LEASE_MS)
    assert (due.job_id, due.webhook, due.num_tries, due.ended_s) == (JOB, HOOK, 0, 5)
    assert await queue.take(8, LEASE_MS) == []

    await queue.again(JOB, 0)
    (due,) = await queue.take(8, LEASE_MS)
    assert due.num_tries == 1


async def test_one_that_is_told_is_forgotten_with_its_secret(
    queue: WebhookQueue, client: Any
) -> None:
    put_due(client, HOOK.encode())
    await queue.take(8, LEASE_MS)
    await queue.done(JOB)

    assert not client.zcard("webhooks")
    assert set(client.hkeys(f"request:{JOB}")) == {b"state", b"ended_ms"}


@pytest.mark.parametrize("written", ["{}", '{"url": "https://x/", "secret": "s", "retries": 9}'])
async def test_one_of_another_build_keeps_all_its_tries_and_waits_for_that_build(
    queue: WebhookQueue, client: Any, written: str
) -> None:
    put_due(client, written)
    for _ in range(3):
        assert await queue.take(8, LEASE_MS) == []
        assert await queue.take(8, LEASE_MS) == [], "it is looked at once a lease"
        client.zadd("webhooks", {JOB: 1})

    client.hset(f"request:{JOB}", "webhook", HOOK.encode())
    (due,) = await queue.take(8, LEASE_MS)
    assert due.num_tries == 0


async def test_one_whose_job_is_forgotten_leaves_nothing(queue: WebhookQueue, client: Any) -> None:
    client.zadd("webhooks", {JOB: 1})
    assert await queue.take(8, LEASE_MS) == []
    await queue._leave(JOB, LEASE_MS)
    await queue.again(JOB, 0)

    assert client.keys() == []
