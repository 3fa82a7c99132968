"""What waits and what became of the rest, in one look: for metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from pipeline.ledger.keys import COUNTERS, DEAD_LETTERS, DEADLINES, HELD, QUEUES, waiting_key
from pipeline.ledger.store import store_errors


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests of the whole pipeline.

    `waiting` by queue, held back or with a message. `num_open` have not ended, `num_held` of these
    have no message yet. `events`: how many were submitted, refused, requeued, or ended in which state,
    since the ledger began.
    """

    waiting: Mapping[str, int]
    num_open: int
    num_held: int
    num_dead_letters: int
    events: Mapping[str, int]


async def read_backlog(client: redis.asyncio.Redis) -> Backlog:
    """Two round trips. Raises `StoreUnavailable`."""
    with store_errors():
        pipe: Any = client.pipeline(transaction=False)
        pipe.smembers(QUEUES)
        pipe.zcard(DEADLINES)
        pipe.scard(HELD)
        pipe.llen(DEAD_LETTERS)
        pipe.hgetall(COUNTERS)
        names, num_open, num_held, num_dead_letters, counts = await pipe.execute()
        queues = sorted(name.decode() for name in names)
        for queue in queues:
            pipe.zcard(waiting_key(queue))
        lengths = await pipe.execute()
    return Backlog(
        waiting=dict(zip(queues, lengths, strict=True)),
        num_open=num_open,
        num_held=num_held,
        num_dead_letters=num_dead_letters,
        events={name.decode(): int(count) for name, count in counts.items()},
    )
