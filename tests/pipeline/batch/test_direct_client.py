"""Lines without a gateway: what is away is waited for, as long as the patience lasts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from pipeline.batch.direct_client import DirectClient
from pipeline.batch.errors import PipelineGone, PipelineRefuses
from pipeline.batch.reader import BatchRequest
from pipeline.ledger.store import connect
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.scheduling.fleet import Role, WorkerState, queues_of
from pipeline.settings import PipelineSettings

NOBODY = "redis://127.0.0.1:1/0"
Open = Callable[..., AbstractAsyncContextManager[DirectClient]]


def line(**body: object) -> BatchRequest:
    fields = {"model": "m", "prompt": "x", **body}
    return BatchRequest(1, "a", "/v1/completions", fields)


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    @asynccontextmanager
    async def make(url: str, patience_s: float = 0.0) -> AsyncIterator[DirectClient]:
        settings = PipelineSettings(redis_url=url, data_dir=tmp_path)
        client = DirectClient(settings, patience_s, lambda _: None)
        await client.open()
        yield client
        await client.close()

    return make


def announce(redis_url: str, engine: str) -> None:
    state = WorkerState(
        worker="w1", node="a", role=Role.BOTH, model="m", namespace="n", engine=engine,
        queues=queues_of(Role.BOTH, "m", "a"), capacity=4, model_path="/gone",
    )  # fmt: skip
    with connect(redis_url) as client:
        ledger = WorkerLedger(client, max_attempts=3, retention_s=60)
        ledger.beat("w1", 4.0, state.model_dump_json())


async def test_a_redis_that_stays_away_ends_the_run(opened: Open) -> None:
    async with opened(NOBODY) as client:
        with pytest.raises(PipelineGone):
            await asyncio.wait_for(client.complete(line()), 10)


async def test_without_any_worker_a_line_waits_and_is_not_refused(
    opened: Open, redis_url: str
) -> None:
    async with opened(redis_url) as client:
        with pytest.raises(PipelineGone, match="no worker"):
            await asyncio.wait_for(client.complete(line()), 10)


async def test_what_is_wrong_with_one_line_is_its_answer(opened: Open, redis_url: str) -> None:
    announce(redis_url, "digest")
    async with opened(redis_url) as client:
        wrong = await client.complete(line(max_tokens=-1))
        unknown = await client.complete(line(model="nope"))
    assert (wrong.status, unknown.status) == (400, 404)
    assert wrong.body["error"]["param"] == "max_tokens"


async def test_a_model_whose_files_are_elsewhere_ends_the_run(opened: Open, redis_url: str) -> None:
    announce(redis_url, "torch")
    async with opened(redis_url, 60.0) as client:
        with pytest.raises(PipelineRefuses):
            await asyncio.wait_for(client.complete(line()), 10)
