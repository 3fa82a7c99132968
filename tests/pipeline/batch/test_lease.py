"""One runner at a time, and another one when it falls silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import redis.asyncio

from pipeline.batch import lease
from pipeline.batch.lease import RunnerLease
from pipeline.ledger.store import connect_async


@pytest.fixture
async def clients(redis_url: str) -> AsyncIterator[list[redis.asyncio.Redis]]:
    async with AsyncExitStack() as stack:
        made = [connect_async(redis_url, max_connections=2) for _ in range(2)]
        for client in made:
            stack.push_async_callback(client.aclose)
        yield made


async def test_the_first_holds_it_until_it_lets_go(clients: list[redis.asyncio.Redis]) -> None:
    first, second = (RunnerLease(client) for client in clients)
    assert await first.hold()
    assert not await second.hold()
    assert await first.hold()
    await first.release()
    assert await second.hold()
    assert not await first.hold()


async def test_a_holder_that_was_silent_for_too_long_has_lost_it(
    clients: list[redis.asyncio.Redis], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 0.2)
    first, second = (RunnerLease(client) for client in clients)
    assert await first.hold()

    async with asyncio.timeout(5):
        while not await second.hold():  # noqa: ASYNC110 - Redis tells nobody that a key expired
            await asyncio.sleep(0.02)
    assert not await first.hold()
    await first.release()
    assert await second.hold()


async def test_nobody_holds_it_without_redis() -> None:
    client = connect_async("redis://127.0.0.1:1/0")
    alone = RunnerLease(client)
    assert not await alone.hold()
    await alone.release()
    await client.aclose()
