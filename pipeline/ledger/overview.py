"""What upkeep and metrics read of the whole ledger. Synchronous; raises `StoreUnavailable`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis

from pipeline.ledger.keys import (
    DEADLINES,
    LEADER,
    QUEUES,
    WORKERS,
    frontier_key,
    lease_key,
    released_key,
    request_key,
    running_key,
    waiting_key,
)
from pipeline.ledger.messages import broker_lists
from pipeline.ledger.store import store_errors
from pipeline.protocol.request import Priority


@dataclass(frozen=True, slots=True)
class ReleasedRequest:
    """A queued request whose message was sent at `released_ms` on the store's clock."""

    request_id: str
    released_ms: int
    priority: int


class LedgerOverview:
    """Reads; the one thing it writes is who leads the upkeep."""

    def __init__(self, client: redis.Redis) -> None:
        # redis-py types replies as "bytes or str"; this client returns bytes.
        self._client: Any = client

    def lead(self, name: str, lease_ms: int) -> bool:
        """Become or stay the leader of upkeep; False if another process leads."""
        with store_errors():
            if self._client.set(LEADER, name, nx=True, px=lease_ms):
                return True
            if self._client.get(LEADER) != name.encode():
                return False
            return bool(self._client.pexpire(LEADER, lease_ms))

    def resign(self, name: str) -> None:
        """Let another process lead at once."""
        with store_errors():
            if self._client.get(LEADER) == name.encode():
                self._client.delete(LEADER)

    def beats(self) -> tuple[int, dict[bytes, bytes]]:
        """(Store clock in ms, last heartbeat by worker)."""
        with store_errors():
            pipe = self._client.pipeline(transaction=False)
            pipe.time()
            pipe.hgetall(WORKERS)
            (seconds, micros), beats = pipe.execute()
        return int(seconds) * 1000 + int(micros) // 1000, beats

    def queues(self) -> list[str]:
        """Queues in which requests wait, or waited."""
        with store_errors():
            return sorted(name.decode() for name in self._client.smembers(QUEUES))

    def is_alive(self, worker: str) -> bool:
        """The worker's lease has not run out."""
        with store_errors():
            return bool(self._client.exists(lease_key(worker)))

    def owned_by(self, worker: str) -> list[str]:
        """Requests that a worker owns."""
        with store_errors():
            return [item.decode() for item in self._client.smembers(running_key(worker))]

    def waiting(self, queue: str, *, limit: int) -> list[str]:
        """The requests that wait in a queue, released or not, the oldest first."""
        with store_errors():
            return [item.decode() for item in self._client.zrange(waiting_key(queue), 0, limit - 1)]

    def models_of(self, request_ids: Sequence[str]) -> list[str]:
        """The model that each of them asks for; empty for one that is gone."""
        with store_errors():
            pipe = self._client.pipeline(transaction=False)
            for request_id in request_ids:
                pipe.hget(request_key(request_id), "model")
            return [(name or b"").decode() for name in pipe.execute()]

    def released(self, queue: str, *, before_ms: int, limit: int) -> list[ReleasedRequest]:
        """Requests whose message was sent before a time and that nobody claimed, the oldest first."""
        found: list[ReleasedRequest] = []
        for priority in Priority:
            with store_errors():
                rows = self._client.zrangebyscore(
                    released_key(queue, priority), 0, before_ms, 0, limit, withscores=True
                )
            found += [ReleasedRequest(raw.decode(), int(at_ms), priority) for raw, at_ms in rows]
        return found

    def num_messages(self, queue: str) -> int:
        """Messages of a queue in the broker."""
        with store_errors():
            return sum(self._client.llen(name) for name in broker_lists(queue))

    def frontier_ms(self, queue: str, priority: int) -> int:
        """When the youngest claimed request of a queue and priority had been released."""
        with store_errors():
            return int(self._client.get(frontier_key(queue, priority)) or 0)

    def overdue(self, now_ms: int, limit: int) -> list[tuple[str, str]]:
        """(Request id, queue) of what is past its deadline."""
        with store_errors():
            ids = [
                item.decode() for item in self._client.zrangebyscore(DEADLINES, 0, now_ms, 0, limit)
            ]
            pipe = self._client.pipeline(transaction=False)
            for request_id in ids:
                pipe.hget(request_key(request_id), "queue")
            queues = pipe.execute()
        return [(name, (queue or b"").decode()) for name, queue in zip(ids, queues, strict=True)]
