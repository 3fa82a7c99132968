"""Puts requests on the compute queue."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import structlog
from celery import Celery
from kombu.exceptions import OperationalError

from pipeline.errors import PipelineError, StoreUnavailable
from pipeline.ledger.keys import is_decode_queue, is_unplaced_queue
from pipeline.ledger.messages import QueueMessage
from pipeline.tasks.app import DECODE_TASK, PREFILL_TASK

log = structlog.get_logger(__name__)

_RETRY = {"max_retries": 3, "interval_start": 0.05, "interval_step": 0.1, "interval_max": 0.3}


class Publisher:
    """Sends one small message per request. Use it from one thread.

    A message that gets lost is no loss: the ledger knows who waits, and upkeep sends it again.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app

    def publish(self, request_id: str, queue: str, priority: int) -> None:
        """Send the task that fits the queue; unplaced lines have no messages.

        Raises:
            StoreUnavailable: the broker does not take it.
        """
        if is_unplaced_queue(queue):
            return
        kind, name = (
            ("decode", DECODE_TASK) if is_decode_queue(queue) else ("prefill", PREFILL_TASK)
        )
        try:
            self._app.send_task(
                name,
                args=(request_id,),
                task_id=f"{request_id}.{kind}.{uuid.uuid4().hex[:8]}",
                queue=queue,
                priority=priority,
                retry_policy=_RETRY,
                argsrepr=f"({request_id},)",
                kwargsrepr="{}",
            )
        except (OperationalError, OSError) as error:
            raise StoreUnavailable(f"{type(error).__name__}: {error}") from error

    def publish_all(self, messages: Iterable[QueueMessage]) -> None:
        """Send each message. Raises `StoreUnavailable`; upkeep sends what was not sent."""
        for message in messages:
            self.publish(*message)


class PublisherThread:
    """Publishes from a thread of its own, so that the caller waits for nothing."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publisher")

    def publish_soon(self, messages: list[QueueMessage]) -> None:
        """Send messages in order; after `close`, upkeep of another process sends them."""
        if not messages:
            return
        try:
            sent = self._thread.submit(self._publisher.publish_all, messages)
        except RuntimeError:
            log.info("publish_left_to_upkeep", num_messages=len(messages))
            return
        sent.add_done_callback(_log_failed_publish)

    def close(self) -> None:
        """Send what was given, and stop."""
        self._thread.shutdown(wait=True)


def _log_failed_publish(sent: Future[None]) -> None:
    """Upkeep will publish again; an operator should still know."""
    error = sent.exception()
    if isinstance(error, PipelineError):
        log.warning("publish_failed", error=str(error))
    elif error is not None:
        log.error("publish_failed", exc_info=error)
