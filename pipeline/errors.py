"""What can go wrong between the processes.

PipelineError
├── StoreUnavailable      Redis does not answer                      → try again, it is retried for you in streams
├── Overloaded            a line is full, or the wait would be too long → try again after `retry_after_s`
├── RequestUnknown        no such request, or its retention is over  → submit it again
├── RequestExists         the id was used before                     → choose another id
├── UnknownSettings       POINTSMAN_* names that no setting owns     → correct the name
├── SettingsInvalid       values that make no sense                  → correct the value
├── DatabaseUnusable      no database of the kind that its URL names → correct the URL, or install its driver
├── StoreLossy            Redis may evict what it was given          → maxmemory-policy noeviction
└── EngineRequired        an engine task ran on an ordinary pool     → start workers with `pointsman worker`
"""

from __future__ import annotations

from enum import StrEnum


class PipelineError(Exception):
    """Root of this room's errors."""


class StoreUnavailable(PipelineError):
    """Redis refused, timed out or went away."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause

    def __str__(self) -> str:
        return f"Redis is not available: {self.cause}"


class FullWhat(StrEnum):
    """Which limit a refused request met."""

    WAITING = "waiting"
    TOKENS = "tokens"
    TENANT = "tenant"
    MODEL = "model"
    DEADLINE = "deadline"


_FULL_WHAT = {
    FullWhat.WAITING: "{count} requests wait already",
    FullWhat.TOKENS: "{count} prompt tokens wait already",
    FullWhat.TENANT: "{count} requests of this tenant are open already",
    FullWhat.MODEL: "{count} requests to this model are open already",
    FullWhat.DEADLINE: "with {count} open requests it would wait longer than it may",
}


class Overloaded(PipelineError):
    """A request was refused before it was queued. `count` is of what is full."""

    def __init__(self, what: FullWhat, count: int, retry_after_s: int) -> None:
        super().__init__(what, count, retry_after_s)
        self.what = what
        self.count = count
        self.retry_after_s = retry_after_s

    @property
    def is_callers_own(self) -> bool:
        """True if others would still be served."""
        return self.what is FullWhat.TENANT

    def __str__(self) -> str:
        full = _FULL_WHAT[self.what].format(count=self.count)
        return f"{full}; try again in {self.retry_after_s} s"


class StoreLossy(PipelineError):
    """Redis is set to drop keys when its memory is full; a request must never vanish."""

    def __init__(self, policy: str) -> None:
        super().__init__(policy)
        self.policy = policy

    def __str__(self) -> str:
        return (
            f"Redis has maxmemory-policy {self.policy} and may drop requests; "
            "set it to noeviction (CONFIG SET maxmemory-policy noeviction, and in its configuration)"
        )


class DatabaseUnusable(PipelineError):
    """Nobody can open a database of this kind; its URL, which may hold a password, is not shown."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"POINTSMAN_DATABASE_URL: {self.reason}"


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


class SettingsInvalid(PipelineError):
    """Environment variables of ours with values that make no sense; the values are not shown."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class EngineRequired(PipelineError):
    """A prefill or decode task reached a worker whose pool is not the engine."""

    def __init__(self, task_id: str) -> None:
        super().__init__(task_id)
        self.task_id = task_id

    def __str__(self) -> str:
        return f"task {self.task_id} needs a worker started with `pointsman worker`"
