"""What waits and what became of the rest, in one look: for metrics and the status screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio

from pipeline.ledger.keys import (
    COUNTERS,
    DEAD_LETTERS,
    DEADLINES,
    QUEUES,
    held_key,
    open_key,
    slug_of,
    waiting_key,
)
from pipeline.ledger.store import store_errors


@dataclass(frozen=True, slots=True)
class ModelBacklog:
    """Requests to one model that have not ended; `num_held` of these have no message yet."""

    num_open: int
    num_held: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests of the whole pipeline.

    `waiting` by queue, held back or with a message. `models` by slug. `num_open` have not ended.
    `events`: how many were submitted, refused, requeued, or ended in which state, since the ledger
    began.
    """

    waiting: Mapping[str, int]
    models: Mapping[str, ModelBacklog]
    num_open: int
    num_dead_letters: int
    events: Mapping[str, int]

    @property
    def num_held(self) -> int:
        """Requests that have no message yet."""
        return sum(model.num_held for model in self.models.values())


async def read_backlog(client: redis.asyncio.Redis) -> Backlog:
    """Two round trips. Raises `StoreUnavailable`."""
    with store_errors():
        totals = await _ask_totals(client).execute()
        lengths = await _ask_lengths(client, _queues(totals)).execute()
    return _backlog(totals, lengths)


def read_backlog_now(client: redis.Redis) -> Backlog:
    """The same, synchronous. Raises `StoreUnavailable`."""
    with store_errors():
        totals = _ask_totals(client).execute()
        lengths = _ask_lengths(client, _queues(totals)).execute()
    return _backlog(totals, lengths)


# redis-py's two clients queue commands alike and differ in how they wait; `Any` stands for either.
def _ask_totals(client: Any) -> Any:
    pipe = client.pipeline(transaction=False)
    pipe.smembers(QUEUES)
    pipe.zcard(DEADLINES)
    pipe.llen(DEAD_LETTERS)
    pipe.hgetall(COUNTERS)
    return pipe


def _ask_lengths(client: Any, queues: Sequence[str]) -> Any:
    pipe = client.pipeline(transaction=False)
    for queue in queues:
        pipe.zcard(waiting_key(queue))
    for slug in _slugs(queues):
        pipe.zcard(open_key(slug))
        pipe.scard(held_key(slug))
    return pipe


def _queues(totals: Sequence[Any]) -> list[str]:
    return sorted(name.decode() for name in totals[0])


def _slugs(queues: Sequence[str]) -> list[str]:
    return sorted({slug_of(queue) for queue in queues})


def _backlog(totals: Sequence[Any], lengths: Sequence[int]) -> Backlog:
    _, num_open, num_dead_letters, counts = totals
    queues = _queues(totals)
    by_model = lengths[len(queues) :]
    return Backlog(
        waiting=dict(zip(queues, lengths, strict=False)),
        models={
            slug: ModelBacklog(by_model[2 * rank], by_model[2 * rank + 1])
            for rank, slug in enumerate(_slugs(queues))
        },
        num_open=num_open,
        num_dead_letters=num_dead_letters,
        events={name.decode(): int(count) for name, count in counts.items()},
    )
