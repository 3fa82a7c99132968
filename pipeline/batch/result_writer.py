"""Puts results on the disk: all that are there at the moment in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

import structlog

from pipeline.batch.line_store import LineResult, LineStore
from pipeline.batch.refusals import DatabaseAway

log = structlog.get_logger(__name__)

MAX_GROUP = 128
MAX_GROUP_BYTES = 4 << 20
RETRY_S = 1.0


class ResultWriter:
    """Group commit: while one transaction is written, the results of the next one gather."""

    def __init__(self, lines: LineStore, storing: Executor) -> None:
        self._lines = lines
        self._storing = storing
        self._waiting: list[tuple[LineResult, asyncio.Future[None]]] = []
        self._rung = asyncio.Event()

    async def add(self, result: LineResult) -> None:
        """Returns when the result is on the disk."""
        kept = asyncio.get_running_loop().create_future()
        self._waiting.append((result, kept))
        self._rung.set()
        await kept

    async def run(self) -> None:
        """Write until cancelled; a database that is away is tried again."""
        while True:
            await self._rung.wait()
            group = self._next_group()
            if not group:
                self._rung.clear()
                continue
            await self._keep([result for result, _ in group])
            for _, kept in group:
                if not kept.done():
                    kept.set_result(None)

    def _next_group(self) -> list[tuple[LineResult, asyncio.Future[None]]]:
        num_bytes, size = 0, 0
        for result, _ in self._waiting[:MAX_GROUP]:
            num_bytes += len(result.output)
            if size and num_bytes > MAX_GROUP_BYTES:
                break
            size += 1
        group = self._waiting[:size]
        del self._waiting[:size]
        return group

    async def _keep(self, results: Sequence[LineResult]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await loop.run_in_executor(self._storing, self._lines.add_results, results)
            except DatabaseAway:
                log.warning("batch_results_wait", num_results=len(results))
            except Exception:
                # The task's edge: were it to end, all batches would stand still in silence.
                log.exception("batch_results_failed", num_results=len(results))
            else:
                return
            await asyncio.sleep(RETRY_S)
