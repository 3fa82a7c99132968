"""The pipeline as a gateway sees it, on a real Redis."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from pipeline.client import PipelineClient
from pipeline.ledger.store import connect
from pipeline.settings import PipelineSettings


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
