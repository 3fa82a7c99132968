"""The pipeline as a gateway sees it: submit, follow, ask, cancel."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import structlog

from pipeline.errors import PipelineError, StoreUnavailable
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.keys import DEADLINES, QUEUES, WORKERS, waiting_key
from pipeline.ledger.overview import LedgerOverview
from pipeline.ledger.store import connect, connect_async, store_errors
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.protocol.request import Request
from pipeline.protocol.stream import RequestStatus, StreamEnded, TokensArrived
from pipeline.scheduling.fleet import EMPTY_FLEET, Fleet
from pipeline.scheduling.router import choose_entry
from pipeline.settings import PipelineSettings
from pipeline.tasks.app import make_app
from pipeline.tasks.publisher import Publisher
from pipeline.tasks.upkeep import Upkeep
from pipeline.token_stream.hub import TokenHub

log = structlog.get_logger(__name__)

FLEET_REFRESH_S = 0.5
FLEET_STALE_S = 2.0


class PipelineClient:
    """One per process and event loop. Publishes from one thread of its own; takes part in upkeep."""

    def __init__(self, settings: PipelineSettings) -> None:
        self._settings = settings
        self.name = f"{settings.node}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._client = connect_async(settings.redis_url)
        self._ledger = ClientLedger(
            self._client, max_waiting=settings.max_waiting, retention_s=settings.retention_s
        )
        self._hub = TokenHub(
            connect_async(settings.redis_url, max_connections=2),
            self._ledger,
            self.name,
            give_up_after_s=settings.queue_deadline_s + settings.total_deadline_s,
        )
        self._publisher = Publisher(make_app(settings.redis_url))
        self._publishing = ThreadPoolExecutor(1, thread_name_prefix="publisher")
        upkeep_client = connect(settings.redis_url)
        self._upkeep = Upkeep(
            self.name,
            LedgerOverview(upkeep_client),
            WorkerLedger(
                upkeep_client,
                max_attempts=settings.max_attempts,
                retention_s=settings.retention_s,
            ),
            Publisher(make_app(settings.redis_url)),
            settings.lease_s,
        )
        self._fleet = EMPTY_FLEET
        self._fleet_seen_s: float | None = None
        self._refresher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to listen and to look after things; returns also when Redis is away."""
        await self._hub.start()
        self._upkeep.start()
        self._refresher = asyncio.create_task(self._refresh_for_ever(), name="fleet")

    async def close(self) -> None:
        """Stop all that `start` began. Requests go on without us."""
        if self._refresher is not None:
            self._refresher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refresher
        await asyncio.to_thread(self._upkeep.close)
        await self._hub.close()
        self._publishing.shutdown(wait=True)
        await self._client.aclose()

    async def submit(self, request: Request) -> None:
        """Enter the request into the ledger and put it on its queue.

        Once this returns the request will end, well or badly, whatever happens to this process.

        Raises:
            Overloaded: too many wait already.
            RequestExists: the id is in use.
            StoreUnavailable: Redis is away; nothing was submitted, or it will expire unheard.
        """
        queue = choose_entry(self._fleet)
        await self._ledger.submit(request, queue, self._hub.channel)
        sent = self._publishing.submit(
            self._publisher.publish, request.request_id, queue, int(request.priority)
        )
        sent.add_done_callback(_log_failed_publish)

    def follow(
        self, request_id: str, *, first_index: int = 0, num_logprobs: int | None = None
    ) -> AsyncIterator[TokensArrived | StreamEnded]:
        """Tokens from `first_index` on, exactly once and in order, then the ending.

        Raises:
            RequestUnknown: no such request, or its retention is over (while iterating).
        """
        return self._hub.follow(request_id, first_index=first_index, num_logprobs=num_logprobs)

    async def status(self, request_id: str) -> RequestStatus | None:
        """Where a request stands; None if unknown. Raises `StoreUnavailable`."""
        return await self._ledger.status(request_id)

    async def cancel(self, request_id: str) -> bool:
        """Cancel; False if unknown or ended. Raises `StoreUnavailable`."""
        return await self._ledger.cancel(request_id)

    async def fleet(self) -> Fleet:
        """Live workers, at most two seconds old.

        Raises:
            StoreUnavailable: the last look at them is older than that.
        """
        now_s = asyncio.get_running_loop().time()
        if self._fleet_seen_s is None or now_s - self._fleet_seen_s > FLEET_STALE_S:
            await self._refresh()
        return self._fleet

    async def num_waiting(self) -> int:
        """Requests in the ledger's waiting lines. Raises `StoreUnavailable`."""
        with store_errors():
            client: Any = self._client
            queues = await client.smembers(QUEUES)
            return sum([int(await client.zcard(waiting_key(name.decode()))) for name in queues])

    async def num_open(self) -> int:
        """Requests that have not ended: waiting or running. Raises `StoreUnavailable`."""
        with store_errors():
            return int(await self._client.zcard(DEADLINES))

    @property
    def num_streams(self) -> int:
        """Streams that this process follows."""
        return self._hub.num_streams

    async def _refresh_for_ever(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):
                await self._refresh()
            await asyncio.sleep(FLEET_REFRESH_S)

    async def _refresh(self) -> None:
        with store_errors():
            pipe = self._client.pipeline(transaction=False)
            pipe.time()
            pipe.hgetall(WORKERS)
            (seconds, micros), beats = await pipe.execute()
        self._fleet = Fleet.decode(beats, int(seconds) * 1000 + int(micros) // 1000)
        self._fleet_seen_s = asyncio.get_running_loop().time()


def _log_failed_publish(sent: Future[None]) -> None:
    """Upkeep will publish again; an operator should still know."""
    error = sent.exception()
    if isinstance(error, PipelineError):
        log.warning("publish_failed", error=str(error))
    elif error is not None:
        log.error("publish_failed", exc_info=error)
