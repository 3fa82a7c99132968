"""Puts requests on the compute queue."""

from __future__ import annotations

import uuid

from celery import Celery
from kombu.exceptions import OperationalError

from pipeline.errors import StoreUnavailable
from pipeline.ledger.keys import UNPLACED_QUEUE, is_decode_queue
from pipeline.tasks.app import DECODE_TASK, PREFILL_TASK

_RETRY = {"max_retries": 3, "interval_start": 0.05, "interval_step": 0.1, "interval_max": 0.3}


class Publisher:
    """Sends one small message per request. Use it from one thread.

    A message that gets lost is no loss: the ledger knows who waits, and upkeep sends it again.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app

    def publish(self, request_id: str, queue: str, priority: int) -> None:
        """Send the task that fits the queue; the unplaced line has no messages.

        Raises:
            StoreUnavailable: the broker does not take it.
        """
        if queue == UNPLACED_QUEUE:
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
