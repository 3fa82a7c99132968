"""How a request ends, well or badly."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended normally, in OpenAI's words; CANCELLED never reaches an OpenAI client."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class FailureCode(StrEnum):
    """Why a request failed. The value is the `code` of the error that clients see."""

    WORKER_LOST = "worker_lost"
    NO_WORKERS = "no_workers"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CONTEXT_EXCEEDED = "context_length_exceeded"
    INTERNAL_ERROR = "internal_error"


@dataclass(frozen=True, slots=True)
class Ending:
    """The last word on a request: exactly one of the two is set."""

    reason: FinishReason | None = None
    failure: FailureCode | None = None

    def encode(self) -> str:
        """`stop`, `length`, `cancelled`, or `error:<code>`; never empty."""
        return f"error:{self.failure}" if self.failure is not None else str(self.reason)

    @classmethod
    def decode(cls, text: str) -> Ending:
        """The inverse of `encode`.

        Raises:
            ValueError: the text names no known ending.
        """
        kind, _, code = text.partition(":")
        if kind == "error":
            return cls(failure=FailureCode(code))
        return cls(reason=FinishReason(kind))
