"""Orders to workers to leave. A worker reads its own with each heartbeat. Synchronous."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import redis

from pipeline.ledger.keys import DRAINS
from pipeline.ledger.store import store_errors

# Behind a worker's name, in the same hash: workers that do not know it pass it over.
_COMES_BACK = ":comes_back"


class DrainOrder(NamedTuple):
    """What still runs after `limit_s` is moved, and the worker ends.

    comes_back: whoever looks after the worker shall start another in its place.
    """

    limit_s: float
    comes_back: bool = False


class DrainOrders:
    """Orders stand until their worker has left; a worker that starts later has none."""

    def __init__(self, client: redis.Redis) -> None:
        # redis-py types replies as "bytes or str"; this client returns bytes.
        self._client: Any = client

    def give(self, workers: Iterable[str], order: DrainOrder) -> None:
        """Tell workers to leave.

        Raises:
            StoreUnavailable: nobody, or some, were told; tell them again.
        """
        orders: dict[str, float] = {}
        for worker in workers:
            orders |= {worker: order.limit_s, worker + _COMES_BACK: int(order.comes_back)}
        with store_errors():
            self._client.hset(DRAINS, mapping=orders)
