"""The Celery app of the compute queue.

Workers, gateways and Flower share it; `python -m celery -A pipeline.tasks.app ...` works as with any
Celery app. Messages carry a request id and nothing else (claim check): prompts and parameters lie in
the ledger.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.exceptions import Ignore
from kombu import Exchange

from pipeline.errors import EngineRequired
from pipeline.protocol.request import Priority
from pipeline.settings import PipelineSettings
from pipeline.tasks.results import TaskResult, take_result

PREFILL_TASK = "pointsman.prefill"
DECODE_TASK = "pointsman.decode"

# Publisher and worker must agree on the steps: each is a Redis list of its own.
_PRIORITY_STEPS = [int(priority) for priority in Priority]
_NEVER_S = 7 * 86_400


class SequenceFailed(Exception):
    """A request ended with a failure; its code is all that Flower needs to show."""


def transport_options(worker: str | None = None) -> dict[str, Any]:
    """Options of kombu's Redis transport; a worker keeps its unacknowledged messages apart.

    Redelivery by time-out is switched off: the ledger, not the broker, owns a request.
    """
    options: dict[str, Any] = {
        "visibility_timeout": _NEVER_S,
        "socket_timeout": 30,
        "socket_connect_timeout": 2,
        "socket_keepalive": True,
        "health_check_interval": 10,
        "queue_order_strategy": "priority",
        "priority_steps": _PRIORITY_STEPS,
    }
    if worker is not None:
        options |= {
            "unacked_key": f"unacked.{worker}",
            "unacked_index_key": f"unacked_index.{worker}",
            "unacked_mutex_key": f"unacked_mutex.{worker}",
        }
    return options


def broker_url(redis_url: str) -> str:
    """The same server in kombu's words, which differ from redis-py's for Unix sockets."""
    if not redis_url.startswith("unix://"):
        return redis_url
    return redis_url.replace("unix://", "redis+socket://", 1).replace("?db=", "?virtual_host=", 1)


def _nameless(_queue: str) -> Exchange:
    """The exchange of any queue: the one that delivers by a queue's name.

    Celery would give each queue its own, whose binding stays in Redis for ever; nodes come and go.
    """
    return Exchange("")


def make_app(redis_url: str) -> Celery:
    """A Celery app on this Redis with both tasks registered."""
    app = Celery(
        "pointsman", broker=redis_url.replace("unix://", "redis+socket://", 1), backend=None
    )
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        # Acknowledged when the engine admits the sequence; from there on the ledger watches over it.
        task_acks_late=False,
        worker_prefetch_multiplier=1,
        task_default_priority=int(Priority.NORMAL),
        task_default_exchange="",
        task_create_missing_queues=True,
        worker_send_task_events=True,
        task_send_sent_event=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        # A Redis that is full or read-only answers with an error of the channel: no reason to end.
        broker_channel_error_retry=True,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        control_queue_expires=60,
        event_queue_expires=60,
        broker_transport_options=transport_options(),
    )

    app.amqp.autoexchange = _nameless

    def run_to_end(self: Any, request_id: str) -> TaskResult:
        """Report what the engine did; by the time Celery traces this, it is done."""
        result = take_result(self.request.id)
        if result is None:
            raise EngineRequired(self.request.id)
        if result["outcome"] == "failed":
            raise SequenceFailed(result["ending"])
        if result["outcome"] == "ignored":
            raise Ignore
        return result

    app.task(run_to_end, name=PREFILL_TASK, bind=True, shared=False)
    app.task(run_to_end, name=DECODE_TASK, bind=True, shared=False)
    return app


def __getattr__(name: str) -> Any:
    """`app` for Celery's command line: built from the environment when first asked for."""
    if name in ("app", "celery"):
        app = globals()["app"] = make_app(PipelineSettings().redis_url)
        return app
    raise AttributeError(name)
