"""Requests that were given up because their workers were lost, and the last faults.

Synchronous; raises `StoreUnavailable`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis

from pipeline.ledger.keys import DEAD_LETTERS, FAULTS, request_key, tokens_key
from pipeline.ledger.store import store_errors

_FIELDS = (
    "model", "tenant", "num_prompt", "attempt", "crashed", "ended_ms", "created_ms", "priority",
    "ending", "sampling",
)  # fmt: skip
MAX_FAULTS = 100


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request that lost too many workers. Times are on the store's clock, in ms.

    `workers` are those that were lost under it. `is_kept`: prompt and parameters are still there, so
    that it can be tried again. `num_log_bytes` of output were written.
    """

    request_id: str
    model: str
    tenant: str
    num_prompt_tokens: int
    attempt: int
    workers: tuple[str, ...]
    created_ms: int
    ended_ms: int
    priority: int
    ending: str
    sampling_json: str
    num_log_bytes: int
    is_kept: bool


class DeadLetters:
    """The list of dead letters; prompts are never shown."""

    def __init__(self, client: redis.Redis) -> None:
        # redis-py types replies as "bytes or str"; this client returns bytes.
        self._client: Any = client

    def ids(self) -> list[str]:
        """The newest first."""
        with store_errors():
            return [item.decode() for item in self._client.lrange(DEAD_LETTERS, 0, -1)]

    def find(self, request_id: str) -> DeadLetter | None:
        """One of the list; None if it is not there, or all of it is too old."""
        with store_errors():
            if self._client.lpos(DEAD_LETTERS, request_id) is None:
                return None
            pipe = self._client.pipeline(transaction=True)
            pipe.hmget(request_key(request_id), list(_FIELDS))
            pipe.hexists(request_key(request_id), "prompt")
            pipe.strlen(tokens_key(request_id))
            values, is_kept, num_log_bytes = pipe.execute()
        fields = {
            name: (value or b"").decode() for name, value in zip(_FIELDS, values, strict=True)
        }
        if not fields["model"]:
            return None
        return DeadLetter(
            request_id=request_id,
            model=fields["model"],
            tenant=fields["tenant"],
            num_prompt_tokens=int(fields["num_prompt"]),
            attempt=int(fields["attempt"]),
            workers=tuple(fields["crashed"].split()),
            created_ms=int(fields["created_ms"]),
            ended_ms=int(fields["ended_ms"] or 0),
            priority=int(fields["priority"]),
            ending=fields["ending"],
            sampling_json=fields["sampling"],
            num_log_bytes=num_log_bytes,
            is_kept=bool(is_kept),
        )

    def drop(self, request_id: str) -> bool:
        """Forget one, its prompt first; False if it was not in the list."""
        with store_errors():
            pipe = self._client.pipeline(transaction=True)
            pipe.lrem(DEAD_LETTERS, 0, request_id)
            pipe.hdel(request_key(request_id), "prompt", "salt")
            return bool(pipe.execute()[0])


class FaultLog:
    """The last hundred things that upkeep had to mend, for `pointsman status`."""

    def __init__(self, client: redis.Redis) -> None:
        self._client: Any = client

    def note(self, now_ms: int, kind: str, **fields: object) -> None:
        """Add one; ids, names and counts only."""
        with store_errors():
            pipe = self._client.pipeline(transaction=False)
            pipe.lpush(FAULTS, json.dumps({"at_ms": now_ms, "kind": kind, **fields}))
            pipe.ltrim(FAULTS, 0, MAX_FAULTS - 1)
            pipe.execute()

    def last(self, count: int) -> list[Mapping[str, Any]]:
        """The newest first."""
        with store_errors():
            return [json.loads(item) for item in self._client.lrange(FAULTS, 0, count - 1)]
