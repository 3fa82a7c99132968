"""Runs a batch file, so many requests at a time, and can go on later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.batch.errors import BatchError
from pipeline.batch.gateway_client import GatewayClient
from pipeline.batch.line_client import Answer, LineClient, OnWait
from pipeline.batch.reader import BatchRequest, check_requests, read_requests
from pipeline.batch.results import SYNC_INTERVAL_S, ResultsFile, response_line
from pipeline.batch.tally import Tally


@dataclass(frozen=True, slots=True)
class BatchJob:
    """What to run. `errors_path` None puts refused requests into the results file too.

    `window` requests are in flight at once; about twice the free slots of the workers fills them.
    """

    input_path: Path
    output_path: Path
    url: str
    window: int = 32
    errors_path: Path | None = None
    api_key: str | None = None
    patience_s: float = 600.0


class BatchRunner:
    """One run of a job. `on_change` hears the tally after each change, on the event loop.

    Lines go through the job's gateway, unless `make_client` makes another client.
    """

    def __init__(
        self,
        job: BatchJob,
        on_change: Callable[[Tally], None],
        make_client: Callable[[OnWait], LineClient] | None = None,
    ) -> None:
        self._job = job
        self._on_change = on_change
        num_requests = check_requests(job.input_path)
        self._results = ResultsFile(job.output_path)
        self._errors = self._results
        if job.errors_path is not None:
            try:
                self._errors = ResultsFile(job.errors_path)
            except BatchError:
                self._results.close()
                raise
        self._tally = Tally(num_requests, self._count_finished(), time.monotonic())
        self._client = (make_client or self._through_gateway)(self._note_wait)

    async def run(self, stop: asyncio.Event) -> Tally:
        """Work until every request has its line, or `stop` is set; returns the tally.

        Requests in flight at a stop have no line and run again next time.

        Raises:
            GatewayRefuses, PipelineRefuses: no line would pass.
            GatewayGone, PipelineGone: nobody answered for too long.
            OSError: a results file cannot be written.
        """
        await self._client.open()
        pending = self._pending()
        workers = [asyncio.create_task(self._work(pending)) for _ in range(self._job.window)]
        finished = asyncio.gather(*workers)
        stopping = asyncio.create_task(stop.wait())
        syncing = asyncio.create_task(self._keep_synced())
        try:
            self._on_change(replace(self._tally))
            ends: set[asyncio.Future[Any]] = {finished, stopping, syncing}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if syncing.done():
                syncing.result()
            if finished.done():
                finished.result()
        finally:
            for task in (*workers, stopping, syncing):
                task.cancel()
            await asyncio.gather(finished, stopping, syncing, return_exceptions=True)
            await self._client.close()
            self._results.close()
            self._errors.close()
        return self._tally

    def _through_gateway(self, on_wait: OnWait) -> LineClient:
        job = self._job
        return GatewayClient(
            job.url,
            job.window,
            api_key=job.api_key,
            patience_s=job.patience_s,
            on_wait=on_wait,
        )

    def _pending(self) -> Iterator[BatchRequest]:
        for request in read_requests(self._job.input_path):
            if not self._is_finished(request.custom_id):
                yield request

    async def _work(self, pending: Iterator[BatchRequest]) -> None:
        for request in pending:
            self._record(request, await self._client.complete(request))

    def _record(self, request: BatchRequest, answer: Answer) -> None:
        file = self._results if answer.is_success else self._errors
        line = response_line(request.custom_id, answer.status, answer.request_id, answer.body)
        file.append(request.custom_id, line)
        self._tally.num_done += answer.is_success
        self._tally.num_failed += not answer.is_success
        self._tally.num_tokens += answer.num_tokens
        self._on_change(replace(self._tally))

    async def _keep_synced(self) -> None:
        while True:
            await asyncio.sleep(SYNC_INTERVAL_S / 4)
            for file in (self._results, self._errors):
                if file.is_sync_due:
                    await asyncio.to_thread(file.sync)

    def _note_wait(self, reason: str) -> None:
        if reason != self._tally.waiting_for:
            self._tally.waiting_for = reason
            self._on_change(replace(self._tally))

    def _is_finished(self, custom_id: str) -> bool:
        return self._results.is_finished(custom_id) or self._errors.is_finished(custom_id)

    def _count_finished(self) -> int:
        return sum(
            self._is_finished(request.custom_id) for request in read_requests(self._job.input_path)
        )
