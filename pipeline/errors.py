"""What can go wrong between the processes.

PipelineError
├── StoreUnavailable      Redis does not answer                      → try again, it is retried for you in streams
├── Overloaded            the waiting line is full                   → try again after `retry_after_s`
├── RequestUnknown        no such request, or its retention is over  → submit it again
├── RequestExists         the id was used before                     → choose another id
├── UnknownSettings       POINTSMAN_* names that no setting owns     → correct the name
└── EngineRequired        an engine task ran on an ordinary pool     → start workers with `pointsman worker`
"""

from __future__ import annotations


class PipelineError(Exception):
    """Root of this room's errors."""


class StoreUnavailable(PipelineError):
    """Redis refused, timed out or went away."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause

    def __str__(self) -> str:
        return f"Redis is not available: {self.cause}"


class Overloaded(PipelineError):
    """The waiting line of a queue is full."""

    def __init__(self, queue: str, num_waiting: int, retry_after_s: int) -> None:
        super().__init__(queue, num_waiting, retry_after_s)
        self.queue = queue
        self.num_waiting = num_waiting
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.num_waiting} requests wait already; try again in {self.retry_after_s} s"


class RequestUnknown(PipelineError):
    """The ledger has no such request."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"no request {self.request_id}; finished ones are kept for a limited time"


class RequestExists(PipelineError):
    """A request with this id was submitted before."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"request {self.request_id} exists already"


class UnknownSettings(PipelineError):
    """Environment variables that look like ours and are not."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(names)
        self.names = names

    def __str__(self) -> str:
        return f"no setting is called {', '.join(self.names)}"


class EngineRequired(PipelineError):
    """A prefill or decode task reached a worker whose pool is not the engine."""

    def __init__(self, task_id: str) -> None:
        super().__init__(task_id)
        self.task_id = task_id

    def __str__(self) -> str:
        return f"task {self.task_id} needs a worker started with `pointsman worker`"
