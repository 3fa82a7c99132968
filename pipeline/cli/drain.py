"""`pointsman drain`: a node's sequences go on elsewhere, and its workers end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pipeline.cli.errors import CommandRefused
from pipeline.ledger.drain_orders import DrainOrder, DrainOrders
from pipeline.ledger.keys import model_slug
from pipeline.ledger.overview import LedgerOverview
from pipeline.ledger.store import connect
from pipeline.scheduling.fleet import Fleet
from pipeline.scheduling.router import choose_decode

POLL_S = 0.2
# Beyond the limit that the sequences get: to hear of the order, to move, to end.
MARGIN_S = 60.0


class NodeUnknown(CommandRefused):
    """No worker of this node is alive."""

    def __init__(self, node: str, known: tuple[str, ...]) -> None:
        super().__init__(node, known)
        self.node = node
        self.known = known

    def __str__(self) -> str:
        known = ", ".join(self.known) or "none"
        return f"no worker of node {self.node} is alive; nodes with workers: {known}"


class NodeNeeded(CommandRefused):
    """Nobody else could go on with what runs there."""

    def __init__(self, node: str, models: tuple[str, ...]) -> None:
        super().__init__(node, models)
        self.node = node
        self.models = models

    def __str__(self) -> str:
        return (
            f"no other node decodes {', '.join(self.models)}: what runs on {self.node} would wait "
            "until one does, or until its deadline; --force drains it nevertheless"
        )


class DrainUnfinished(CommandRefused):
    """Workers are still there after the limit."""

    def __init__(self, node: str, workers: tuple[str, ...]) -> None:
        super().__init__(node, workers)
        self.node = node
        self.workers = workers

    def __str__(self) -> str:
        return f"{self.node} is not drained yet: {', '.join(self.workers)}"


def drain_node(
    redis_url: str, node: str, order: DrainOrder, *, is_forced: bool, say: Callable[[str], None]
) -> int:
    """Order the node's workers to leave and wait until they have; how many they were.

    Where others come in their place, what runs on the only node that decodes waits for them.

    Raises:
        NodeUnknown: it has no workers.
        NodeNeeded: for one of its models no other node could go on, and it is not forced.
        DrainUnfinished: some did not leave in time.
        StoreUnavailable: Redis does not answer; an order that was given stands.
    """
    client: Any = connect(redis_url)
    try:
        overview = LedgerOverview(client)
        fleet = _fleet(overview)
        workers = {name for name, state in fleet.workers.items() if state.node == node}
        if not workers:
            nodes = sorted({state.node for state in fleet.workers.values() if state.node})
            raise NodeUnknown(node, tuple(nodes))
        others = fleet.without_node(node)
        models = {fleet.workers[name].model for name in workers}
        left = sorted(m for m in models if choose_decode(others, model_slug(m)) is None)
        if left and not (is_forced or order.comes_back):
            raise NodeNeeded(node, tuple(left))
        DrainOrders(client).give(workers, order)
        _wait(overview, node, workers, time.monotonic() + order.limit_s + MARGIN_S, say)
    finally:
        client.close()
    return len(workers)


def _fleet(overview: LedgerOverview) -> Fleet:
    now_ms, beats = overview.beats()
    return Fleet.decode(beats, now_ms)


def _wait(
    overview: LedgerOverview,
    node: str,
    workers: set[str],
    until_s: float,
    say: Callable[[str], None],
) -> None:
    said = ""
    while left := workers & set(_fleet(overview).workers):
        if time.monotonic() > until_s:
            raise DrainUnfinished(node, tuple(sorted(left)))
        num_requests = sum(len(overview.owned_by(worker)) for worker in left)
        line = f"{node}: {len(left)} of {len(workers)} workers left, {num_requests} requests"
        if line != said:
            say(line)
            said = line
        time.sleep(POLL_S)
