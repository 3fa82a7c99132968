"""What runs the lines of `batch run`: a gateway, or the pipeline itself."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

from pipeline.batch.reader import BatchRequest

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
# A failure that follows one request around is that request's answer.
MAX_SERVER_FAILURES = 3

# Hears why a request waits; "" when it goes on.
OnWait = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """A final answer: the status, the gateway's request id, and the body as JSON."""

    status: int
    request_id: str
    body: Any

    @property
    def is_success(self) -> bool:
        """True for a completion, False for an error body."""
        return self.status == HTTPStatus.OK

    @property
    def num_tokens(self) -> int:
        """Generated tokens, as the body's usage says."""
        usage = self.body.get("usage") if isinstance(self.body, dict) else None
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        return count if isinstance(count, int) else 0


class LineClient(Protocol):
    """One per run of a batch."""

    async def open(self) -> None:
        """Be ready for `complete`."""
        ...

    async def complete(self, request: BatchRequest) -> Answer:
        """The final answer, at batch priority; tries again where that helps.

        Raises:
            BatchError: no line would pass, or nobody answered for too long.
        """
        ...

    async def close(self) -> None:
        """Let go; requests in flight are cancelled."""
        ...


def backoff_s(num_tries: int) -> float:
    """How long to wait before the next try, the last ones alike."""
    longest_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(num_tries - 1, 10))
    return longest_s * random.uniform(0.75, 1.0)  # noqa: S311 (spreads retries, keeps no secret)
