"""A worker's signs of life, and its ear for cancellations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import redis
import structlog

from pipeline.errors import StoreUnavailable
from pipeline.ledger.drain_orders import DrainOrder
from pipeline.ledger.keys import control_channel
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.protocol.request import Priority
from pipeline.scheduling.fleet import WorkerState

log = structlog.get_logger(__name__)

BEAT_S = 1.0
RECONNECT_S = 0.2


@dataclass(slots=True)
class Heartbeat:
    """Renews the lease and tells the worker's state every second, from a thread of its own.

    Celery's timers stand still while it drains, and a drain must not look like a death. `is_well`
    False means that the engine is gone: the lease is left to run out, so that others take over.
    `on_drain` gets an ordered drain, with each beat until the worker leaves; `on_owned` how many requests
    the ledger takes to be ours, and may raise `StoreUnavailable`; `on_waiting` our share of the prompts that
    wait, by priority: while some do, and once when none does any more.
    """

    worker: str
    ledger: WorkerLedger
    lease_s: float
    state: Callable[[], WorkerState]
    before_beat: Callable[[], None]
    is_well: Callable[[], bool]
    on_cancelled: Callable[[str], None]
    on_drain: Callable[[DrainOrder], None]
    on_owned: Callable[[int], None]
    on_waiting: Callable[[Mapping[Priority, int]], None]
    _was_waiting: bool = False
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def beat(self) -> None:
        """Once, now. Raises `StoreUnavailable`."""
        state_json = self.state().model_dump_json()
        told = self.ledger.beat(self.worker, self.lease_s, state_json)
        for request_id in told.cancelled:
            self.on_cancelled(request_id)
        if told.drain is not None:
            self.on_drain(told.drain)
        # Also the same number again: those of the last beat may have come, and others stand there.
        is_waiting = any(told.waiting.values())
        if is_waiting or self._was_waiting:
            self.on_waiting(told.waiting)
        self._was_waiting = is_waiting
        self.on_owned(told.num_owned)

    def start(self) -> None:
        """Beat now and every second until `close`."""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and strike the worker off."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        try:
            self.ledger.leave(self.worker)
        except StoreUnavailable as error:
            log.warning("left_without_store", error=str(error))

    def _run(self) -> None:
        interval_s = min(BEAT_S, self.lease_s / 4)
        was_away = False
        while True:
            if not self.is_well():
                log.error("engine_lost_lease_not_renewed", worker=self.worker)
                return
            self.before_beat()
            try:
                self.beat()
                was_away = False
            except StoreUnavailable as error:
                if not was_away:
                    log.warning("beat_missed", error=str(error))
                was_away = True
            if self._stop.wait(interval_s):
                return


@dataclass(slots=True)
class ControlListener:
    """Hears cancellations at once; the heartbeat and each step collect what it misses."""

    worker: str
    client: Any
    on_cancelled: Callable[[str], None]
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen until `close`."""
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=3)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._listen()
            except (redis.RedisError, OSError) as error:
                log.warning("control_lost", error=type(error).__name__)
                self._stop.wait(RECONNECT_S)

    def _listen(self) -> None:
        pubsub: Any = self.client.pubsub(ignore_subscribe_messages=True)
        try:
            pubsub.subscribe(control_channel(self.worker))
            while not self._stop.is_set():
                message = pubsub.get_message(timeout=1.0)
                if message is not None:
                    self.on_cancelled(message["data"].decode())
        finally:
            pubsub.close()
