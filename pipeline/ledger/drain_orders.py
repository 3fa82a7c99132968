"""Orders to workers to leave. A worker reads its own with each heartbeat. Synchronous."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import redis

from pipeline.ledger.keys import DRAINS
from pipeline.ledger.store import store_errors


class DrainOrders:
    """Orders stand until their worker has left; a worker that starts later has none."""

    def __init__(self, client: redis.Redis) -> None:
        # redis-py types replies as "bytes or str"; this client returns bytes.
        self._client: Any = client

    def give(self, workers: Iterable[str], limit_s: float) -> None:
        """Tell workers to move what still runs after `limit_s`, and to end.

        Raises:
            StoreUnavailable: nobody, or some, were told; tell them again.
        """
        with store_errors():
            self._client.hset(DRAINS, mapping=dict.fromkeys(workers, limit_s))
