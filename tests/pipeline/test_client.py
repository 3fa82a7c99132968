"""The pipeline as a gateway sees it, on a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.embedded_redis import EmbeddedRedis
from pipeline.client import PipelineClient
from pipeline.errors import StoreUnavailable
from pipeline.ledger.keys import WORKERS
from pipeline.ledger.store import connect
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.protocol.request import Request, RequestState
from pipeline.protocol.sampling import SamplingParams
from pipeline.scheduling.fleet import Role, WorkerState
from pipeline.settings import PipelineSettings

LIMIT_S = 20.0


async def test_those_who_look_at_the_workers_at_once_share_one_look(
    redis_url: str, tmp_path: Path
) -> None:
    pipeline = PipelineClient(PipelineSettings(redis_url=redis_url, data_dir=tmp_path))
    store: Any = connect(redis_url)
    store.config_resetstat()

    fleets = await asyncio.gather(*(pipeline.fleet(0.0) for _ in range(20)))

    assert all(fleet is fleets[0] for fleet in fleets)
    assert store.info("commandstats")["cmdstat_hgetall"]["calls"] == 1
    await pipeline.fleet(60.0)
    assert store.info("commandstats")["cmdstat_hgetall"]["calls"] == 1
    await pipeline.close()
    store.close()


async def test_a_heartbeat_that_cannot_be_read_blinds_nobody_for_good(
    redis_url: str, tmp_path: Path
) -> None:
    pipeline = PipelineClient(PipelineSettings(redis_url=redis_url, data_dir=tmp_path))
    store: Any = connect(redis_url)
    store.hset(WORKERS, "broken", b"\xc1")
    store.config_resetstat()
    await pipeline.start()
    try:
        async with asyncio.timeout(10):
            while "cmdstat_hgetall" not in store.info("commandstats"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            store.hdel(WORKERS, "broken")
            state = WorkerState(
                worker="w", node="n", role=Role.BOTH, model="m", namespace="", queues=(), capacity=1
            )
            beat = WorkerLedger(store, max_attempts=3, retention_s=60).beat
            while "w" not in pipeline.known_fleet.workers:
                beat("w", 4.0, state.model_dump_json())
                await asyncio.sleep(0.01)
    finally:
        await pipeline.close()
        store.close()


def freeze(server: EmbeddedRedis) -> None:
    os.kill(server.pid or 0, signal.SIGSTOP)


def thaw(server: EmbeddedRedis) -> None:
    os.kill(server.pid or 0, signal.SIGCONT)


@pytest.mark.parametrize(
    ("stop_answering", "answer_again"),
    [(EmbeddedRedis.stop, EmbeddedRedis.start), (freeze, thaw)],
    ids=["gone", "frozen"],
)
async def test_what_is_abandoned_while_redis_is_away_is_cancelled_when_it_is_back(
    tmp_path: Path,
    stop_answering: Callable[[EmbeddedRedis], None],
    answer_again: Callable[[EmbeddedRedis], None],
) -> None:
    server = EmbeddedRedis(tmp_path / "redis", persistent=True)
    server.start()
    pipeline = PipelineClient(PipelineSettings(redis_url=server.url, data_dir=tmp_path))
    try:
        await pipeline.start()
        await pipeline.submit(Request("r1", "m", [1, 2], SamplingParams(max_tokens=4)))
        await asyncio.to_thread(stop_answering, server)
        async with asyncio.timeout(2):
            await pipeline.abandon(["r1", "unknown"])
        await asyncio.to_thread(answer_again, server)

        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(StoreUnavailable):
                    status = await pipeline.status("r1")
                    if status is not None and status.state is RequestState.CANCELLED:
                        break
                await asyncio.sleep(0.05)
    finally:
        await pipeline.close()
        server.stop()


async def test_a_client_that_is_closed_while_it_connects_ends(
    redis_url: str, tmp_path: Path
) -> None:
    """redis-py can swallow a cancellation that meets it there."""
    settings = PipelineSettings(redis_url=redis_url, data_dir=tmp_path)
    for number in range(10):
        pipeline = PipelineClient(settings)
        await pipeline.start()
        for _ in range(number):
            await asyncio.sleep(0)
        closing = asyncio.create_task(pipeline.close())
        done, _ = await asyncio.wait({closing}, timeout=LIMIT_S)
        closing.cancel()
        assert done
