"""The pipeline as a gateway sees it: submit, follow, ask, cancel."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Sequence

import structlog

from pipeline.cancellation import end_tasks
from pipeline.errors import StoreUnavailable
from pipeline.ledger.admission import AdmissionLimits, TokenDeadlines
from pipeline.ledger.backlog import Backlog, read_backlog
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.dead_letters import FaultLog
from pipeline.ledger.job_index import JobIndex
from pipeline.ledger.keys import (
    WORKERS,
    model_slug,
    node_key,
    request_key,
    scores_key,
    tokens_key,
)
from pipeline.ledger.overview import LedgerOverview
from pipeline.ledger.store import connect, connect_async, store_errors
from pipeline.ledger.webhooks import WebhookQueue
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.protocol.cache_use import CacheUse
from pipeline.protocol.request import Request
from pipeline.protocol.stream import RequestStatus, StreamEnded, TokensArrived
from pipeline.protocol.tokens import TokenRecord, unpack_records
from pipeline.scheduling.fleet import EMPTY_FLEET, Fleet
from pipeline.scheduling.node_report import NodeReport
from pipeline.scheduling.router import choose_entry
from pipeline.settings import PipelineSettings
from pipeline.tasks.app import make_app
from pipeline.tasks.publisher import Publisher, PublisherThread
from pipeline.tasks.upkeep import Upkeep
from pipeline.token_stream.hub import TokenHub

log = structlog.get_logger(__name__)

FLEET_REFRESH_S = 0.5
FLEET_STALE_S = 2.0
FORGET_S = 5
MAX_UNWANTED = 10_000
ABANDON_S = 0.5  # less than a stopping gateway has left for last words


class PipelineClient:
    """One per process and event loop. Publishes from one thread of its own; takes part in upkeep."""

    def __init__(self, settings: PipelineSettings) -> None:
        self._settings = settings
        self.name = f"{settings.node}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._client = connect_async(settings.redis_url)
        self._ledger = ClientLedger(
            self._client,
            limits=admission_limits(settings),
            retention_s=settings.retention_s,
            deadlines=TokenDeadlines(
                settings.first_token_deadline_s, settings.token_gap_deadline_s
            ),
        )
        self.jobs = JobIndex(self._client, self._ledger)
        self.webhooks = WebhookQueue(self._client)
        self._hub = TokenHub(
            connect_async(settings.redis_url, max_connections=2, num_retries=0),
            self._ledger,
            self.name,
            give_up_after_s=settings.queue_deadline_s + settings.total_deadline_s,
        )
        self._publishing = PublisherThread(Publisher(make_app(settings.redis_url)))
        upkeep_client = connect(settings.redis_url)
        self._upkeep = Upkeep(
            self.name,
            LedgerOverview(upkeep_client),
            WorkerLedger(
                upkeep_client,
                max_attempts=settings.max_attempts,
                retention_s=settings.retention_s,
                dead_letter_retention_s=settings.dead_letter_retention_s,
            ),
            Publisher(make_app(settings.redis_url)),
            settings.lease_s,
            FaultLog(upkeep_client),
        )
        self._fleet = EMPTY_FLEET
        self._fleet_seen_s: float | None = None
        self._unwanted: dict[str, None] = {}  # whose cancellation is owed, oldest first
        self._entries: dict[str, tuple[str, float]] = {}  # by slug, of the last look
        self._look: asyncio.Task[None] | None = None
        self._refresher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to listen and to look after things; returns also when Redis is away."""
        await self._hub.start()
        self._upkeep.start()
        self._refresher = asyncio.create_task(self._refresh_for_ever(), name="fleet")

    async def close(self) -> None:
        """Stop all that `start` began. Requests go on without us."""
        await end_tasks(*(task for task in (self._refresher, self._look) if task is not None))
        await asyncio.to_thread(self._upkeep.close)
        await self._hub.close()
        self._publishing.close()
        await self._client.aclose()

    async def submit(self, request: Request) -> None:
        """Enter the request into the ledger and put it on its queue.

        Once this returns the request will end, well or badly, whatever happens to this process.

        Raises:
            Overloaded: too many wait already, or it would wait too long.
            RequestExists: the id is in use.
            StoreUnavailable: Redis is away; nothing was submitted, or it will expire unheard.
        """
        queue, tokens_per_s = self._entry(model_slug(request.model))
        messages = await self._ledger.submit(request, queue, self._hub.channel, tokens_per_s)
        self._publishing.publish_soon(messages)

    def _entry(self, slug: str) -> tuple[str, float]:
        """A model's first queue and its prompt tokens per second, which only a new look can change."""
        if slug not in self._entries:
            queue = choose_entry(self._fleet, slug)
            self._entries[slug] = queue, self._fleet.prefill_tokens_per_s(queue)
        return self._entries[slug]

    def follow(
        self, request_id: str, *, first_index: int = 0, num_logprobs: int | None = None
    ) -> AsyncIterator[TokensArrived | StreamEnded]:
        """Tokens from `first_index` on, exactly once and in order, then the ending.

        Raises:
            RequestUnknown: no such request, or its retention is over (while iterating).
        """
        return self._hub.follow(request_id, first_index=first_index, num_logprobs=num_logprobs)

    async def prompt_scores(self, request_id: str, num_logprobs: int) -> list[TokenRecord] | None:
        """Log-probabilities of all prompt tokens but the first; there before the first token.

        None: not there, or the retention is over. Raises `StoreUnavailable`.
        """
        data = await self._ledger.scores(request_id)
        return None if data is None else list(unpack_records(data, num_logprobs))

    async def status(self, request_id: str) -> RequestStatus | None:
        """Where a request stands; None if unknown. Raises `StoreUnavailable`."""
        return await self._ledger.status(request_id)

    async def cache_use(self, request_id: str) -> CacheUse | None:
        """Where its prompt's KV came from; None before its first token. Raises `StoreUnavailable`."""
        return await self._ledger.cache_use(request_id)

    async def card(self, request_id: str) -> bytes | None:
        """The `card` of a request's `JobTerms`; None: there is none. Raises `StoreUnavailable`."""
        return await self._ledger.card(request_id)

    async def drop_card(self, request_id: str) -> None:
        """Forget the card. Raises `StoreUnavailable`."""
        await self._ledger.drop_card(request_id)

    async def cancel(self, request_id: str) -> bool:
        """Cancel; False if unknown or ended. Raises `StoreUnavailable`."""
        return await self._ledger.cancel(request_id)

    async def abandon(self, request_ids: Sequence[str]) -> None:
        """Cancel for callers that are gone, now or as soon as Redis can be told. Never raises, soon returns.

        At most 10,000 wait for that.
        """
        self._unwanted.update(dict.fromkeys(request_ids))
        while len(self._unwanted) > MAX_UNWANTED:
            self._unwanted.pop(next(iter(self._unwanted)))
        try:
            async with asyncio.timeout(ABANDON_S):
                await asyncio.gather(*map(self._cancel_unwanted, request_ids))
        except (StoreUnavailable, TimeoutError):
            log.info("cancellation_owed", num_requests=len(self._unwanted))
        except Exception:
            log.exception("cancel_failed")

    async def _cancel_unwanted(self, request_id: str) -> None:
        await self.cancel(request_id)
        self._unwanted.pop(request_id, None)

    async def forget(self, request_ids: Sequence[str]) -> None:
        """Drop ended requests whose tokens nobody will read again, before their retention is over.

        Raises:
            StoreUnavailable: they go with their retention.
        """
        with store_errors():
            pipe = self._client.pipeline(transaction=False)
            for request_id in request_ids:
                pipe.expire(request_key(request_id), FORGET_S)
                pipe.expire(tokens_key(request_id), FORGET_S)
                pipe.expire(scores_key(request_id), FORGET_S)
            await pipe.execute()

    @property
    def known_fleet(self) -> Fleet:
        """The workers as seen last; nobody before the first look."""
        return self._fleet

    async def fleet(self, max_age_s: float = FLEET_STALE_S) -> Fleet:
        """Live workers, as they were so long ago at most.

        Raises:
            StoreUnavailable: the last look at them is older than that.
        """
        now_s = asyncio.get_running_loop().time()
        if self._fleet_seen_s is None or now_s - self._fleet_seen_s > max_age_s:
            # Those who ask at once share one look.
            if self._look is None:
                self._look = asyncio.create_task(self._refresh(), name="look")
                self._look.add_done_callback(self._end_look)
            await asyncio.shield(self._look)
        return self._fleet

    def _end_look(self, look: asyncio.Task[None]) -> None:
        self._look = None
        if not look.cancelled():
            look.exception()  # told to whoever still waits

    async def node_reports(self) -> list[NodeReport]:
        """What the cache daemons of the workers' nodes told last. Raises `StoreUnavailable`."""
        fleet = await self.fleet()
        with store_errors():
            pipe = self._client.pipeline(transaction=False)
            for node in sorted(fleet.nodes):
                pipe.get(node_key(node))
            reports = await pipe.execute()
        return NodeReport.decode(filter(None, reports))

    async def backlog(self) -> Backlog:
        """What waits in all queues, and counts of the rest. Raises `StoreUnavailable`."""
        return await read_backlog(self._client)

    @property
    def num_streams(self) -> int:
        """Streams that this process follows."""
        return self._hub.num_streams

    async def _refresh_for_ever(self) -> None:
        while True:
            try:
                await self._refresh()
                for request_id in list(self._unwanted):
                    await self._cancel_unwanted(request_id)
            except StoreUnavailable:
                pass  # told to those who ask for it
            except Exception:
                # The task's edge: were it to end, requests would go on to workers that are gone.
                log.exception("fleet_unreadable")
            await asyncio.sleep(FLEET_REFRESH_S)

    async def _refresh(self) -> None:
        with store_errors():
            pipe = self._client.pipeline(transaction=False)
            pipe.time()
            pipe.hgetall(WORKERS)
            (seconds, micros), beats = await pipe.execute()
        self._fleet = Fleet.decode(beats, int(seconds) * 1000 + int(micros) // 1000)
        self._fleet_seen_s = asyncio.get_running_loop().time()
        self._entries.clear()


def admission_limits(settings: PipelineSettings) -> AdmissionLimits:
    """What the settings let wait."""
    return AdmissionLimits(
        max_waiting=settings.max_waiting,
        max_waiting_tokens=settings.max_waiting_tokens,
        max_open_per_tenant=settings.max_open_per_tenant,
        max_open_per_model=settings.max_open_per_model,
    )
