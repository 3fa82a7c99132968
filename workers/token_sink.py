"""The worker's side of the token stream: one Redis call per engine step, on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from pipeline.errors import StoreUnavailable
from pipeline.ledger.claim import TailHint
from pipeline.ledger.messages import QueueMessage
from pipeline.ledger.worker_ledger import LogWrite, WorkerLedger
from pipeline.protocol.tokens import TokenRecord, pack_records
from workers.sequence import Sequence, StepOutput

log = structlog.get_logger(__name__)

IDLE_S = 1.0
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 0.5


class SinkListener(Protocol):
    """Who hears what became of sequences. Called on the engine or the sink thread; must be quick."""

    def on_admitted(self, sequence: Sequence) -> None:
        """The engine took it in."""
        ...

    def on_ended(self, sequence: Sequence) -> None:
        """Its ending stands in the ledger."""
        ...

    def on_handed_over(self, sequence: Sequence) -> None:
        """Another worker goes on with it."""
        ...

    def on_superseded(self, request_id: str, attempt: int) -> None:
        """The ledger fenced this attempt off."""
        ...

    def on_cancelled(self, request_id: str) -> None:
        """The ledger wants this request stopped."""
        ...


@dataclass(slots=True)
class _OpenLog:
    """Everything this attempt knows of a request's log, to write it again if the store lost it.

    The first `num_found_bytes` were there before the attempt.
    """

    sequence: Sequence
    data: bytearray
    num_found_bytes: int
    num_sent_bytes: int
    ending: str = ""
    scores: bytes | None = None
    has_sent_scores: bool = False


@dataclass(slots=True)
class TokenSink:
    """Writes what the engine produced; the engine's `EngineSink`.

    `hand_over` gives a prefilled sequence to its next worker: it is called after everything that
    this attempt wrote is in the ledger, and answers False if the attempt was stale. `publish_soon`
    sends the messages of requests that may start because others ended; it must not wait.
    """

    worker: str
    ledger: WorkerLedger
    listener: SinkListener
    hand_over: Callable[[Sequence, TailHint | None], bool]
    publish_soon: Callable[[list[QueueMessage]], None]
    num_retries: int = 0
    _items: deque[list[StepOutput] | Sequence] = field(default_factory=deque)
    _logs: dict[tuple[str, int], _OpenLog] = field(default_factory=dict)
    _rung: threading.Event = field(default_factory=threading.Event)
    _is_closing: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Run in a thread until `close`."""
        self._thread = threading.Thread(target=self._run, name="token-sink", daemon=True)
        self._thread.start()

    def close(self, limit_s: float = 5.0) -> None:
        """Write what is left, for at most `limit_s`."""
        self._is_closing = True
        self._rung.set()
        if self._thread is not None:
            self._thread.join(limit_s)

    def open(self, sequence: Sequence, logged: list[TokenRecord]) -> None:
        """Know a sequence, and the records of earlier attempts, before the engine gets it."""
        data = bytearray(pack_records(logged, sequence.sampling.num_logprobs))
        self._logs[sequence.request_id, sequence.attempt] = _OpenLog(
            sequence, data, len(data), len(data)
        )

    def forget(self, request_id: str, attempt: int) -> None:
        """Drop a sequence that will produce nothing more."""
        self._logs.pop((request_id, attempt), None)

    def on_admitted(self, sequence: Sequence) -> None:
        """See `EngineSink`."""
        self.listener.on_admitted(sequence)

    def on_step(self, outputs: list[StepOutput]) -> None:
        """See `EngineSink`."""
        self._items.append(outputs)
        self._rung.set()

    def on_prefilled(self, sequence: Sequence) -> None:
        """See `EngineSink`."""
        self._items.append(sequence)
        self._rung.set()

    def _run(self) -> None:
        while not (self._is_closing and not self._items):
            self._rung.wait(IDLE_S)
            self._rung.clear()
            dirty: dict[tuple[str, int], _OpenLog] = {}
            prefilled: list[Sequence] = []
            while self._items:
                item = self._items.popleft()
                if isinstance(item, Sequence):
                    prefilled.append(item)
                else:
                    self._append(item, dirty)
            self._write_until_taken(dirty)
            for sequence in prefilled:
                self._hand_over(sequence)

    def _append(self, outputs: list[StepOutput], dirty: dict[tuple[str, int], _OpenLog]) -> None:
        for output in outputs:
            key = (output.sequence.request_id, output.sequence.attempt)
            entry = self._logs.get(key)
            if entry is None:
                continue
            if output.record is not None:
                entry.data += pack_records([output.record], output.sequence.sampling.num_logprobs)
            if output.ending is not None:
                entry.ending = output.ending.encode()
            if output.prompt_records is not None:
                num_logprobs = output.sequence.sampling.num_logprobs
                entry.scores = pack_records(output.prompt_records, num_logprobs)
            dirty[key] = entry

    def _write_until_taken(self, dirty: dict[tuple[str, int], _OpenLog]) -> None:
        """Write the logs' new parts. A lost answer is harmless: every write says where it belongs."""
        retry_s = FIRST_RETRY_S
        while dirty:
            try:
                self._write(dirty)
            except StoreUnavailable as error:
                if self._is_closing:
                    log.error("tokens_not_written", num_requests=len(dirty), error=str(error))
                    return
                if retry_s == FIRST_RETRY_S:
                    log.warning("token_write_retried", error=str(error))
                self.num_retries += 1
                time.sleep(retry_s)
                retry_s = min(LAST_RETRY_S, retry_s * 2)

    def _write(self, dirty: dict[tuple[str, int], _OpenLog]) -> None:
        self._write_scores(dirty)
        writes = [
            LogWrite(
                request_id=request_id,
                attempt=attempt,
                offset_bytes=entry.num_sent_bytes,
                data=bytes(entry.data[entry.num_sent_bytes :]),
                ending=entry.ending,
                num_cached=entry.sequence.num_cached,
                cache_use=_cache_use(entry),
            )
            for (request_id, attempt), entry in dirty.items()
        ]
        reply = self.ledger.write_step(self.worker, writes)
        self.publish_soon(reply.messages)
        written = dict(dirty)
        dirty.clear()
        for request_id, attempt in reply.stale:
            written.pop((request_id, attempt), None)
            self.forget(request_id, attempt)
            self.listener.on_superseded(request_id, attempt)
        for key in [key for key in written if key[0] in reply.short]:
            entry = written.pop(key)
            entry.num_sent_bytes = 0
            entry.has_sent_scores = False
            dirty[key] = entry
            log.warning("token_log_rewritten", request_id=key[0], num_bytes=len(entry.data))
        for (request_id, attempt), entry in written.items():
            entry.num_sent_bytes = len(entry.data)
            if entry.ending:
                self.forget(request_id, attempt)
                self.listener.on_ended(entry.sequence)
        for request_id in reply.cancelled:
            self.listener.on_cancelled(request_id)

    def _write_scores(self, dirty: dict[tuple[str, int], _OpenLog]) -> None:
        """Scores of a prompt stand in the ledger before the first token that follows it.

        Whoever sees a token, or an ending, finds them; a next attempt need not score again.
        """
        for (request_id, attempt), entry in dirty.items():
            if entry.scores is not None and not entry.has_sent_scores:
                self.ledger.write_scores(request_id, self.worker, attempt, entry.scores)
                entry.has_sent_scores = True

    def _hand_over(self, sequence: Sequence) -> None:
        key = (sequence.request_id, sequence.attempt)
        if key not in self._logs:
            return
        tail = None
        if sequence.tail_key is not None:
            tail = TailHint(sequence.attempt, sequence.num_computed)
        is_taken: bool | None = None
        retry_s = FIRST_RETRY_S
        while is_taken is None:
            try:
                is_taken = self.hand_over(sequence, tail)
            except StoreUnavailable as error:
                if self._is_closing:
                    log.error("hand_over_not_written", request_id=sequence.request_id)
                    return
                if retry_s == FIRST_RETRY_S:
                    log.warning("hand_over_retried", error=str(error))
                self.num_retries += 1
                time.sleep(retry_s)
                retry_s = min(LAST_RETRY_S, retry_s * 2)
        self.forget(*key)
        if is_taken:
            self.listener.on_handed_over(sequence)
        else:
            self.listener.on_superseded(*key)


def _cache_use(entry: _OpenLog) -> str:
    """Told with the first tokens of the attempt."""
    use = entry.sequence.cache_use
    is_first = entry.num_sent_bytes in (0, entry.num_found_bytes)
    return use.model_dump_json() if use is not None and is_first else ""
