"""The Celery pool that is the engine: tasks are sequences, not threads.

A message becomes a `Job`. It is accepted (acknowledged, task-started) when the engine admits its
sequence, so Celery's prefetch bounds what waits inside a worker; it is traced when the sequence has
ended, so states, events, revoke and Flower work as with any pool. Celery's callbacks run on its event
loop only.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import structlog
from celery.concurrency.base import BasePool
from kombu.transport import redis as kombu_redis
from kombu.transport.virtual import QoS as VirtualQoS
from redis.exceptions import ResponseError

from pipeline.errors import StoreUnavailable
from pipeline.tasks.app import DECODE_TASK, PREFILL_TASK
from pipeline.tasks.results import TaskResult, put_result
from workers.request_desk import RequestDesk
from workers.settings import EngineSettings

log = structlog.get_logger(__name__)

NUM_CLAIM_THREADS = 4
POLL_S = 0.05


class SafeQoS(kombu_redis.QoS):  # type: ignore[misc]
    """kombu's bookkeeping of unacknowledged messages, safe against Redis being away.

    kombu 5.7 gives every unacknowledged message back when it loses its connection; with Redis down
    that raises AttributeError, and Celery ends. What is not given back is found by the ledger.

    It also takes no message while every place of the engine is taken: in the broker it is there for
    whoever is free first, in this process it would wait behind what runs.
    """

    has_place: ClassVar[Callable[[], bool]] = staticmethod(lambda: True)

    def can_consume(self) -> bool:
        """True if one more message may come to this process."""
        return bool(super().can_consume()) and SafeQoS.has_place()

    def ack(self, delivery_tag: str) -> None:
        """Acknowledge; a Redis that takes no writes must not cost one of the places for messages.

        What then stays in Redis goes away with this worker; its request is in the ledger.
        """
        self._settle(super().ack, delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:  # noqa: FBT001, FBT002 - kombu's
        """As `ack`."""
        self._settle(partial(super().reject, requeue=requeue), delivery_tag)

    def _settle(self, settle: Callable[[str], None], delivery_tag: str) -> None:
        if self.channel.connection is None:
            # The message came through a connection that is lost: nobody waits to hear of it.
            VirtualQoS.ack(self, delivery_tag)
            return
        try:
            settle(delivery_tag)
        except ResponseError as error:
            log.warning("ack_refused", error=type(error).__name__)
            VirtualQoS.ack(self, delivery_tag)

    def restore_unacked_once(self, stderr: object = None) -> None:
        """Give messages back, or forget them."""
        try:
            super().restore_unacked_once(stderr)
        except Exception as error:  # noqa: BLE001 - kombu raises AttributeError among others
            log.warning("restore_skipped", error=type(error).__name__)
            self._delivered.clear()
            self._delivered.restored = True


def install_safe_qos() -> None:
    """Make kombu use `SafeQoS`; before the worker connects."""
    kombu_redis.Channel.QoS = SafeQoS


@dataclass(slots=True, eq=False, weakref_slot=True)
class Job:
    """One task in flight; also the `Ticket` that its request is opened with.

    Celery keeps only a weak reference to it, so the pool holds the strong one.
    """

    pool: EnginePool
    task_id: str
    request_id: str
    target: Callable[..., tuple[int, Any, float]]
    args: tuple[Any, ...]
    callback: Callable[..., None]
    accept_callback: Callable[[int, float], None]
    started_s: float = field(default_factory=time.monotonic)
    is_accepted: bool = False
    is_revoked: bool = False

    def terminate(self, signal: object = None) -> None:
        """Celery's revoke(terminate=True) and Flower's button: cancel the request for good."""
        del signal
        self.is_revoked = True
        self.pool.cancel(self.request_id)

    def on_admitted(self) -> None:
        """See `Ticket`."""
        self.pool.call(self._accept)

    def on_done(self, result: TaskResult) -> None:
        """See `Ticket`."""
        self.pool.call(lambda: self.pool.finish(self, result))

    def _accept(self) -> None:
        if not self.is_accepted:
            self.is_accepted = True
            self.accept_callback(os.getpid(), self.started_s)

    def report(self, result: TaskResult) -> None:
        """Let Celery trace the task with its result. On Celery's event loop."""
        self._accept()
        if self.is_revoked:
            return  # Request.terminate() has announced and acknowledged it
        if result["ending"] == "cancelled":
            # Private, but the only way to the state REVOKED from inside; tests hold it.
            request: Any = self.callback.__self__  # type: ignore[attr-defined]
            request._announce_revoked(  # noqa: SLF001
                reason="cancelled", terminated=True, signum=None, expired=False
            )
            return
        put_result(self.task_id, result)
        failed, value, _ = self.target(*self.args)
        self.callback((failed, value, time.monotonic() - self.started_s))


class EnginePool(BasePool):  # type: ignore[misc]
    """Gives tasks to the request desk. A subclass made by `bound_to` carries the desk.

    `places` is how many sequences the engine runs at once; as many jobs are taken, and no more. None
    is taken while `max_waiting` sequences wait inside the engine for blocks: another worker may have some.

    The drain hook is called once at a warm shutdown; it returns when the engine is empty or the time
    is up, with every open request reported.
    """

    desk: RequestDesk
    drain: Callable[[], None]
    places: int
    max_waiting: int

    signal_safe = False
    body_can_be_buffer = True
    task_join_will_block = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._jobs: dict[str, Job] = {}
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._claiming = ThreadPoolExecutor(NUM_CLAIM_THREADS, thread_name_prefix="claim")
        self._hub: Any = None
        self._is_stopped = False
        SafeQoS.has_place = staticmethod(self._has_place)

    @classmethod
    def bound_to(
        cls, desk: RequestDesk, drain: Callable[[], None], settings: EngineSettings
    ) -> type[EnginePool]:
        """The class to give to Celery, which makes its own instance."""
        bound = {
            "desk": desk,
            "drain": staticmethod(drain),
            "places": settings.max_batch_sequences,
            "max_waiting": settings.max_waiting,
        }
        return type("BoundEnginePool", (cls,), bound)

    def _has_place(self) -> bool:
        return len(self._jobs) < self.places and self.desk.engine.stats().waiting < self.max_waiting

    def register_with_event_loop(self, loop: Any) -> None:
        """Celery's hook: where its callbacks must run."""
        self._hub = loop

    def on_apply(
        self,
        target: Callable[..., tuple[int, Any, float]],
        args: tuple[Any, ...],
        kwargs: object = None,
        callback: Any = None,
        accept_callback: Any = None,
        **_: object,
    ) -> Job:
        """Celery hands a task over; on its event loop, so nothing here waits."""
        name, task_id = args[:2]
        known = self._jobs.get(task_id)
        if known is not None:
            # Our own message came back after a lost connection: the engine goes on.
            known.callback, known.accept_callback, known.is_accepted = (
                callback,
                accept_callback,
                False,
            )
            known.on_admitted()
            return known
        request_id = _request_id(args[3]) if name in (PREFILL_TASK, DECODE_TASK) else None
        job = Job(self, task_id, request_id or "", target, args, callback, accept_callback)
        self._jobs[task_id] = job
        if request_id is None:
            # Raising here would end the whole worker for one bad message.
            log.error("task_refused", task=name, task_id=task_id)
            job.on_done(_failed())
        else:
            self._claiming.submit(self._open, job)
        return job

    def _open(self, job: Job) -> None:
        try:
            self.desk.open(job.request_id, job)
        except Exception:
            log.exception("open_failed", request_id=job.request_id)
            job.on_done(_failed())

    def cancel(self, request_id: str) -> None:
        """Cancel in the background; a Redis that is away is logged."""

        def run() -> None:
            try:
                self.desk.cancel(request_id)
            except StoreUnavailable as error:
                log.error("revoke_failed", request_id=request_id, error=str(error))

        self._claiming.submit(run)

    def finish(self, job: Job, result: TaskResult) -> None:
        """Report a job and let go of it."""
        try:
            job.report(result)
        finally:
            self._jobs.pop(job.task_id, None)

    def call(self, function: Callable[[], None]) -> None:
        """Run something on Celery's event loop, from any thread."""
        self._calls.put(function)
        if self._hub is not None and not self._is_stopped:
            self._hub.call_soon(self._run_calls)

    def _run_calls(self) -> None:
        while True:
            try:
                function = self._calls.get_nowait()
            except queue.Empty:
                return
            try:
                function()
            except Exception:
                log.exception("celery_callback_failed")

    def on_stop(self) -> None:
        """Warm shutdown: the event loop stands still now, so its calls are run here."""
        self._is_stopped = True
        draining = threading.Thread(target=self.drain, name="drain", daemon=True)
        draining.start()
        while draining.is_alive():
            self._run_calls()
            draining.join(POLL_S)
        self._claiming.shutdown(wait=True)
        self._run_calls()

    def on_terminate(self) -> None:
        """Cold shutdown: nothing is waited for; the ledger gives the requests to others."""
        self._is_stopped = True

    def terminate_job(self, pid: int, signal: object = None) -> None:
        """Celery calls this beside `Job.terminate`, which does the work."""

    def _get_info(self) -> dict[str, Any]:
        stats = self.desk.engine.stats()
        return {
            **super()._get_info(),
            "engine": {"running": stats.running, "waiting": stats.waiting},
        }


def _failed() -> TaskResult:
    return TaskResult(
        outcome="failed",
        ending="error:internal_error",
        prompt_tokens=0,
        cached_tokens=0,
        output_tokens=0,
    )


def _request_id(body: bytes | memoryview | str) -> str | None:
    """The one argument of a task, from its JSON body (protocol 2); None if it is not that."""
    try:
        args = json.loads(bytes(body) if isinstance(body, memoryview) else body)[0]
    except (ValueError, LookupError, TypeError):
        return None
    is_one_id = isinstance(args, list) and len(args) == 1 and isinstance(args[0], str)
    return args[0] if is_one_id else None
