"""What one worker talks to Redis through. Each call makes connections of its own: threads share none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.ledger.claim import TailHint
from pipeline.ledger.dead_letters import FaultLog
from pipeline.ledger.keys import unplaced_queue
from pipeline.ledger.node_board import NodeBoard
from pipeline.ledger.overview import LedgerOverview
from pipeline.ledger.store import connect
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.scheduling.fleet import Fleet
from pipeline.scheduling.router import choose_decode
from pipeline.settings import PipelineSettings
from pipeline.tasks.app import make_app
from pipeline.tasks.publisher import Publisher, PublisherThread
from pipeline.tasks.upkeep import Upkeep
from workers.request_desk import RequestDesk
from workers.sequence import Sequence
from workers.token_sink import TokenSink


@dataclass(slots=True)
class HandOver:
    """Gives prefilled sequences to the decode node of their model that has most room."""

    worker: str
    slug: str
    namespace: str
    ledger: WorkerLedger
    overview: LedgerOverview
    publisher: Publisher

    def __call__(self, sequence: Sequence, tail: TailHint | None) -> bool:
        """False if the attempt is stale. Raises `StoreUnavailable`."""
        now_ms, beats = self.overview.beats()
        fleet = Fleet.decode(beats, now_ms)
        queue = choose_decode(fleet, self.slug, self.namespace) or unplaced_queue(self.slug)
        messages = self.ledger.hand_over(
            sequence.request_id, self.worker, sequence.attempt, queue, tail
        )
        if messages is None:
            return False
        self.publisher.publish_all(messages)
        return True


@dataclass(frozen=True, slots=True)
class StoreLinks:
    """Makes them, for the worker of this id, which serves the model of this slug."""

    shared: PipelineSettings
    worker: str
    slug: str

    def ledger(self) -> WorkerLedger:
        """Claims, writes, gives back."""
        return self._ledger_on(connect(self.shared.redis_url))

    def overview(self) -> LedgerOverview:
        """Reads of the whole ledger."""
        return LedgerOverview(connect(self.shared.redis_url))

    def board(self) -> NodeBoard:
        """Where nodes tell of themselves."""
        return NodeBoard(connect(self.shared.redis_url))

    def upkeep(self) -> Upkeep:
        """This worker's part in the upkeep."""
        client = connect(self.shared.redis_url)
        return Upkeep(
            self.worker,
            LedgerOverview(client),
            self._ledger_on(client),
            Publisher(make_app(self.shared.redis_url)),
            self.shared.lease_s,
            FaultLog(client),
        )

    def token_sink(self, desk: RequestDesk, namespace: str) -> TokenSink:
        """Writes the engine's tokens, and hands sequences over to workers of the same namespace."""
        redis_url = self.shared.redis_url
        client = connect(redis_url)
        ledger = self._ledger_on(client)
        hand_over = HandOver(
            self.worker,
            self.slug,
            namespace,
            ledger,
            LedgerOverview(client),
            Publisher(make_app(redis_url)),
        )
        publishing = PublisherThread(Publisher(make_app(redis_url)))
        return TokenSink(self.worker, ledger, desk, hand_over, publishing.publish_soon)

    def _ledger_on(self, client: Any) -> WorkerLedger:
        return WorkerLedger(
            client,
            max_attempts=self.shared.max_attempts,
            retention_s=self.shared.retention_s,
            dead_letter_retention_s=self.shared.dead_letter_retention_s,
        )
