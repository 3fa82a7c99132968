"""The loop that sees to it that nothing is lost: one leader at a time, in any gateway or worker.

It takes requests from workers whose lease ran out, moves those that wait where nobody serves, releases
what there is room for, sends messages again that the broker lost, and ends what is past its deadline.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import structlog

from pipeline.errors import StoreUnavailable
from pipeline.ledger.dead_letters import FaultLog
from pipeline.ledger.keys import is_decode_queue, model_slug, slug_of, unplaced_queue
from pipeline.ledger.overview import LedgerOverview, ReleasedRequest
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.protocol.failure import FailureCode
from pipeline.scheduling.fleet import Fleet
from pipeline.scheduling.router import choose_decode, choose_entry
from pipeline.tasks.publisher import Publisher

log = structlog.get_logger(__name__)

TICK_S = 0.25
LEADER_MS = 900
LOST_MESSAGE_MS = 1_000
BATCH = 500
MAX_REMEMBERED = 10 * BATCH


@dataclass(slots=True)
class Upkeep:
    """Upkeep of one pipeline. `name` is unique per process.

    Everything it is given is used from the upkeep thread alone.
    """

    name: str
    overview: LedgerOverview
    ledger: WorkerLedger
    publisher: Publisher
    lease_s: float
    faults: FaultLog
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _last_contact_s: float = float("-inf")
    _trust_leases_from_s: float = 0.0
    _sent_again_ms: dict[str, int] = field(default_factory=dict)
    _unpaired: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Run in a thread until `close`."""
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and let another process lead at once."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        is_away = False
        # What happened before we were there is not known: Redis may have been away, and the workers with it.
        self._trust_leases_from_s = time.monotonic() + self.lease_s
        while not self._stop.wait(TICK_S):
            try:
                leads = self.overview.lead(self.name, LEADER_MS)
                now_s = time.monotonic()
                self._note_contact(now_s)
                if leads:
                    self.tick(now_s)
                is_away = False
            except StoreUnavailable as error:
                if not is_away:
                    log.warning("upkeep_store_unavailable", error=str(error))
                is_away = True
            except Exception:
                log.exception("upkeep_failed")
        try:
            self.overview.resign(self.name)
        except StoreUnavailable:
            log.info("upkeep_left_without_store")

    def _note_contact(self, now_s: float) -> None:
        """Distrust leases after a gap: if we were frozen or cut off, the workers may have been too.

        Every lease looks expired then; they get the time to renew, as at our start.
        """
        if self.lease_s / 2 < now_s - self._last_contact_s < float("inf"):
            self._trust_leases_from_s = now_s + self.lease_s
        self._last_contact_s = now_s

    def tick(self, now_s: float) -> None:
        """One round. `now_s` is this process's monotonic clock.

        Raises:
            StoreUnavailable: Redis went away in the middle; the next round starts over.
        """
        now_ms, beats = self.overview.beats()
        fleet = Fleet.decode(beats, now_ms)
        if now_s >= self._trust_leases_from_s:
            for worker in fleet.workers:
                if not self.overview.is_alive(worker):
                    self._take_from_lost(fleet, worker, now_ms)
        self._tell_of_unpaired(
            [w for w in fleet.unpaired() if fleet.of_model(fleet.workers[w].slug).ready]
        )
        served = fleet.served_queues()
        for queue in self.overview.queues():
            if queue in served:
                self._send_lost_messages(queue, now_ms)
            else:
                self._move_waiting(fleet, queue)
        self._end_overdue(served, now_ms)
        self.publisher.publish_all(self.ledger.release())

    def _tell_of_unpaired(self, unpaired: list[str]) -> None:
        if unpaired and unpaired != self._unpaired:
            log.warning(
                "prefill_workers_not_paired",
                workers=unpaired,
                remedy="no decode node has their model and block_tokens; decode nodes compute prompts",
            )
        self._unpaired = unpaired

    def _end_overdue(self, served: set[str], now_ms: int) -> None:
        for request_id, queue in self.overview.overdue(now_ms, BATCH):
            code = FailureCode.QUEUE_TIMEOUT if queue in served else FailureCode.NO_WORKERS
            late_for = self.ledger.expire(request_id, code)
            if late_for is not None:
                log.warning("request_overdue", request_id=request_id, late_for=late_for)
                self.faults.note(now_ms, "overdue", request_id=request_id, late_for=late_for)

    def _take_from_lost(self, fleet: Fleet, worker: str, now_ms: int) -> None:
        owned = self.overview.owned_by(worker)
        log.warning("worker_lost", worker=worker, num_requests=len(owned))
        self.faults.note(now_ms, "worker_lost", worker=worker, num_requests=len(owned))
        without = fleet.without(worker)
        guilty = self.ledger.convict(worker)
        if guilty is not None:
            log.warning("worker_killed_by_request", worker=worker, request_id=guilty)
            self.faults.note(now_ms, "killed_by_request", worker=worker, request_id=guilty)
        needs_decode = not fleet.workers[worker].can_prefill
        for request_id, model in zip(owned, self.overview.models_of(owned), strict=True):
            target = _next_queue(without, model_slug(model), needs_decode=needs_decode)
            messages = self.ledger.requeue_lost(request_id, worker, target)
            self.publisher.publish_all(messages or [])
        self.ledger.strike_off(worker)

    def _move_waiting(self, fleet: Fleet, queue: str) -> None:
        """Find another queue for what waits where nobody serves."""
        waiting = self.overview.waiting(queue, limit=BATCH)
        if not waiting:
            if is_decode_queue(queue) or not slug_of(queue):
                self.ledger.forget_queue(queue)
            return
        for slug, request_ids in self._by_model(queue, waiting).items():
            target = _next_queue(fleet, slug, needs_decode=is_decode_queue(queue))
            if target == queue:
                continue
            for request_id in request_ids:
                self.publisher.publish_all(self.ledger.place(request_id, queue, target) or [])
            log.info("waiting_moved", queue=queue, to=target, num_requests=len(request_ids))

    def _by_model(self, queue: str, waiting: list[str]) -> dict[str, list[str]]:
        """Requests by slug; the name of a queue of older builds does not say it."""
        slug = slug_of(queue)
        if slug:
            return {slug: waiting}
        found: dict[str, list[str]] = {}
        for request_id, model in zip(waiting, self.overview.models_of(waiting), strict=True):
            found.setdefault(model_slug(model), []).append(request_id)
        return found

    def _send_lost_messages(self, queue: str, now_ms: int) -> None:
        """Publish again for requests whose message cannot be in the broker any more.

        That is so if the broker's lists are empty, or if a younger request of the same queue and
        priority was claimed (each list is first in, first out).
        """
        released = self.overview.released(queue, before_ms=now_ms - LOST_MESSAGE_MS, limit=BATCH)
        if not released:
            return
        is_empty = self.overview.num_messages(queue) == 0
        frontiers = {
            priority: self.overview.frontier_ms(queue, priority)
            for priority in {request.priority for request in released}
        }
        if len(self._sent_again_ms) > MAX_REMEMBERED:
            self._sent_again_ms.clear()
        for request in released:
            is_lost = is_empty or frontiers[request.priority] > request.released_ms
            if is_lost and self._may_send_again(request, now_ms):
                self.publisher.publish(request.request_id, queue, request.priority)
                log.warning("message_sent_again", request_id=request.request_id, queue=queue)
                self.faults.note(now_ms, "message_lost", request_id=request.request_id, queue=queue)

    def _may_send_again(self, request: ReleasedRequest, now_ms: int) -> bool:
        last_ms = max(self._sent_again_ms.get(request.request_id, 0), request.released_ms)
        if now_ms - last_ms < LOST_MESSAGE_MS:
            return False
        self._sent_again_ms[request.request_id] = now_ms
        return True


def _next_queue(fleet: Fleet, slug: str, *, needs_decode: bool) -> str:
    if needs_decode:
        return choose_decode(fleet, slug) or unplaced_queue(slug)
    return choose_entry(fleet, slug)
