"""Between the queue and the engine: claims requests, makes sequences of them, reports their end.

Knows no Celery: a caller opens a request and hears through its `Ticket` what became of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from pipeline.errors import StoreUnavailable
from pipeline.ledger.claim import ClaimedRequest, ClaimRefusal, ClaimUnreadable
from pipeline.ledger.keys import slug_of, unplaced_queue
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.protocol.failure import Ending, FinishReason
from pipeline.tasks.results import TaskResult
from tiering.block_hash import owner_tag, tail_key
from workers.sequence import Peer, Sequence
from workers.step_loop import Engine, EngineStopped
from workers.token_grammar import TokenGrammar
from workers.token_sink import TokenSink

log = structlog.get_logger(__name__)

CLAIM_RETRY_S = 0.2


class Ticket(Protocol):
    """The caller's end of one opened request."""

    def on_admitted(self) -> None:
        """The request runs here."""
        ...

    def on_done(self, result: TaskResult) -> None:
        """Nothing more will happen here; called exactly once."""
        ...


@dataclass(slots=True)
class RequestDesk:
    """One per worker process.

    `key_root_for` gives the root of block keys for a tenant's salt and a request's own.
    `hands_over` is true on prefill workers. `grammar_for` brings a request's grammar to where its
    logged tokens have led; it may take a while. `peers_for` says where the blocks of a request may
    lie that a worker of that name had before.
    """

    worker: str
    queues: tuple[str, ...]
    hands_over: bool
    ledger: WorkerLedger
    key_root_for: Callable[[str, str], bytes]
    grammar_for: Callable[[ClaimedRequest], TokenGrammar | None]
    engine: Engine = field(init=False)
    sink: TokenSink = field(init=False)
    peers_for: Callable[[str], tuple[Peer, ...]] = lambda _: ()
    _tickets: dict[str, Ticket] = field(default_factory=dict)
    _attempts: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closing: bool = False
    _has_lacked: bool = False

    @property
    def num_open(self) -> int:
        """Requests that were opened and are not done."""
        return len(self._tickets)

    def open(self, request_id: str, ticket: Ticket) -> None:
        """Claim a request and give it to the engine; may wait for Redis.

        A message that leads to no work (it came twice, the request was cancelled or moved) is done at
        once.
        """
        with self._lock:
            is_open = request_id in self._tickets
            old_attempt = self._attempts.get(request_id)
            if not is_open:
                self._tickets[request_id] = ticket
        if is_open and old_attempt is None:
            # Another thread is claiming it at this moment.
            ticket.on_done(_result("ignored", str(ClaimRefusal.TAKEN)))
            return
        claim = self._claim(request_id)
        if is_open and (not isinstance(claim, ClaimedRequest) or claim.attempt == old_attempt):
            ticket.on_done(_result("ignored", str(ClaimRefusal.TAKEN)))
            return
        if not isinstance(claim, ClaimedRequest):
            outcome = "cancelled" if claim is ClaimRefusal.CANCELLED else str(claim)
            log.info("claim_refused", request_id=request_id, why=outcome)
            self._done(request_id, _result("ignored", outcome))
            return
        if old_attempt is not None:
            # We were taken for dead, and get back what we still run: the newer attempt counts.
            self.sink.forget(request_id, old_attempt)
            self.on_superseded(request_id, old_attempt)
            with self._lock:
                self._tickets[request_id] = ticket
        self._run(claim)

    def _run(self, claim: ClaimedRequest) -> None:
        sequence = self._make_sequence(claim)
        with self._lock:
            self._attempts[claim.request_id] = claim.attempt
        self.sink.open(sequence, claim.logged)
        try:
            self.engine.submit(sequence)
        except EngineStopped:
            # Claimed while the worker was closing: it goes to another one.
            self.give_back([sequence], unplaced_queue(slug_of(self.queues[0])))

    def cancel(self, request_id: str) -> None:
        """Stop a request for good: in the ledger, and through it here. Raises `StoreUnavailable`."""
        self.ledger.cancel(request_id)

    def give_back(self, sequences: list[Sequence], queue: str) -> None:
        """Return what the engine did not finish to the ledger, for another worker.

        The messages go out on the way of those that endings bring; upkeep finds what is not sent.
        """
        for sequence in sequences:
            self.sink.forget(sequence.request_id, sequence.attempt)
            try:
                messages = self.ledger.give_back(sequence.request_id, self.worker, queue)
                self.sink.publish_soon(messages or [])
            except StoreUnavailable as error:
                log.error("give_back_failed", request_id=sequence.request_id, error=str(error))
            self._done(sequence.request_id, _result("superseded", "returned", sequence))

    def compare(self, num_owned: int) -> None:
        """To be told now and then how many requests the ledger takes to be ours.

        Those that we do not have are given back: a Redis that lost its last writes, as one does that is
        replaced by its replica, has forgotten that they ended, and nobody would end them again.

        Raises:
            StoreUnavailable: it is looked at again the next time.
        """
        lacked, self._has_lacked = self._has_lacked, num_owned > len(self._attempts)
        if not (lacked and self._has_lacked):
            return  # one that comes or goes at this moment is on one side only
        owned = self.ledger.owned_by(self.worker)
        with self._lock:
            strays = [request_id for request_id in owned if request_id not in self._tickets]
        for request_id in strays:
            messages = self.ledger.give_back(request_id, self.worker, self.queues[0])
            if messages is not None:
                log.warning("stray_given_back", request_id=request_id)
                self.sink.publish_soon(messages)

    def refuse_more(self) -> None:
        """Open nothing from now on: what arrives stays queued."""
        self._is_closing = True

    def on_admitted(self, sequence: Sequence) -> None:
        """See `SinkListener`."""
        ticket = self._tickets.get(sequence.request_id)
        if ticket is not None:
            ticket.on_admitted()

    def on_ended(self, sequence: Sequence) -> None:
        """See `SinkListener`."""
        ending = sequence.ending or Ending(reason=FinishReason.STOP)
        if ending.failure is not None:
            result = _result("failed", ending.encode(), sequence)
        elif ending.reason is FinishReason.CANCELLED:
            result = _result("ignored", "cancelled", sequence)
        else:
            result = _result("finished", ending.encode(), sequence)
        self._done(sequence.request_id, result)

    def on_handed_over(self, sequence: Sequence) -> None:
        """See `SinkListener`."""
        self._done(sequence.request_id, _result("handed_over", "", sequence))

    def on_superseded(self, request_id: str, attempt: int) -> None:
        """See `SinkListener`."""
        log.warning("attempt_superseded", request_id=request_id, attempt=attempt)
        self.engine.cancel(request_id, attempt, silent=True)
        self._done(request_id, _result("superseded", ""), attempt)

    def on_cancelled(self, request_id: str) -> None:
        """See `SinkListener`."""
        self.engine.cancel(request_id)

    def _done(self, request_id: str, result: TaskResult, attempt: int | None = None) -> None:
        """Let go of a request; with `attempt` only if that is still the one that is open here."""
        with self._lock:
            if attempt is not None and self._attempts.get(request_id) != attempt:
                return
            ticket = self._tickets.pop(request_id, None)
            self._attempts.pop(request_id, None)
        if ticket is not None:
            ticket.on_done(result)

    def _claim(self, request_id: str) -> ClaimedRequest | ClaimRefusal:
        """Ask until the ledger answers; asking twice is harmless."""
        is_first = True
        while not self._is_closing:
            try:
                return self._claim_now(request_id)
            except StoreUnavailable as error:
                if is_first:
                    log.warning("claim_retried", request_id=request_id, error=str(error))
                is_first = False
                time.sleep(CLAIM_RETRY_S)
        return ClaimRefusal.MOVED

    def _claim_now(self, request_id: str) -> ClaimedRequest | ClaimRefusal:
        try:
            return self.ledger.claim(request_id, self.worker, self.queues)
        except ClaimUnreadable as unreadable:
            log.error("request_unreadable", request_id=request_id, remedy=str(unreadable))
            self.sink.publish_soon(self.ledger.end_unreadable(self.worker, unreadable))
            return ClaimRefusal.FINAL

    def _make_sequence(self, claim: ClaimedRequest) -> Sequence:
        root = self.key_root_for(claim.tenant_salt, claim.sampling.cache_salt)
        tail = claim.tail
        return Sequence(
            request_id=claim.request_id,
            attempt=claim.attempt,
            tokens=claim.prompt_tokens + [record.token_id for record in claim.logged],
            num_prompt_tokens=len(claim.prompt_tokens),
            sampling=claim.sampling,
            key_root=root,
            priority=claim.priority,
            tenant=claim.tenant,
            owner=owner_tag(claim.tenant_salt.encode()),
            peers=self.peers_for(claim.came_from),
            num_logged=len(claim.logged),
            hands_over=self.hands_over,
            tail_key=(
                tail_key(root, claim.request_id, tail.attempt, tail.num_tokens) if tail else None
            ),
            deadline_s=time.monotonic() + claim.remaining_s,
            grammar=self._grammar(claim),
        )

    def _grammar(self, claim: ClaimedRequest) -> TokenGrammar | None:
        """None also if it cannot be had: the engine then ends the sequence as broken."""
        if not claim.sampling.grammar:
            return None
        try:
            return self.grammar_for(claim)
        except Exception:
            # The edge to what a request brings along: it may not take this thread down.
            log.exception("grammar_failed", request_id=claim.request_id)
            return None


def _result(outcome: str, ending: str, sequence: Sequence | None = None) -> TaskResult:
    return TaskResult(
        outcome=outcome,  # type: ignore[typeddict-item]
        ending=ending,
        prompt_tokens=sequence.num_prompt_tokens if sequence else 0,
        cached_tokens=sequence.num_cached if sequence else 0,
        output_tokens=sequence.num_generated if sequence else 0,
    )
