"""Where nodes are told about: one short-lived key each. Synchronous; raises `StoreUnavailable`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import redis

from pipeline.ledger.keys import LINKS, node_key
from pipeline.ledger.store import store_errors

REPORT_LIFETIME_S = 15


class NodeBoard:
    """The last report of each node; one that nobody renews runs out."""

    def __init__(self, client: redis.Redis) -> None:
        # redis-py types replies as "bytes or str"; this client returns bytes.
        self._client: Any = client

    def post(self, node: str, report_json: str) -> None:
        """Replace a node's report."""
        with store_errors():
            self._client.set(node_key(node), report_json, ex=REPORT_LIFETIME_S)

    def read(self, nodes: Iterable[str]) -> list[bytes]:
        """The reports of those nodes that have one."""
        with store_errors():
            pipe = self._client.pipeline(transaction=False)
            for node in sorted(set(nodes)):
                pipe.get(node_key(node))
            return [report for report in pipe.execute() if report is not None]

    def post_link(self, name: str, report_json: str) -> None:
        """Replace what is known of one link; it stays until it is measured again."""
        with store_errors():
            self._client.hset(LINKS, name, report_json)

    def read_some_links(self, names: Sequence[str]) -> list[bytes]:
        """Those of these links that were ever measured."""
        with store_errors():
            reports = self._client.hmget(LINKS, list(names)) if names else []
            return [report for report in reports if report is not None]

    def read_links(self) -> list[bytes]:
        """All links that were ever measured."""
        with store_errors():
            return list(self._client.hgetall(LINKS).values())
