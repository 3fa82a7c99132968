"""Which queue a request waits in."""

from __future__ import annotations

from pipeline.ledger.keys import PREFILL_QUEUE, UNPLACED_QUEUE, decode_queue
from pipeline.scheduling.fleet import Fleet


def choose_entry(fleet: Fleet) -> str:
    """The first queue of a new or recovered request.

    Without a decode worker nobody could finish it: it waits unplaced, and no prefill is spent on it.
    Without a prefill worker a decode node computes the prompt itself. So it does while some prefill
    worker is not paired with a decode node: the queue is shared, and what that worker computed would
    be of no use.
    """
    decode = choose_decode(fleet)
    if decode is None:
        return UNPLACED_QUEUE
    return PREFILL_QUEUE if fleet.num_prefill and not fleet.unpaired() else decode


def choose_decode(fleet: Fleet, namespace: str | None = None) -> str | None:
    """The decode queue of the least loaded node, None if no node decodes.

    Load is occupied places per place; names break ties, so that all routers agree. With a
    `namespace`, only nodes whose KV blocks are interchangeable with it count.
    """
    nodes = {
        node: states
        for node, states in fleet.decode_nodes().items()
        if namespace is None or all(state.namespace == namespace for state in states)
    }
    if not nodes:
        return None

    def load(node: str) -> tuple[float, str]:
        states = nodes[node]
        busy = sum(state.num_running + state.num_waiting for state in states)
        return busy / max(1, sum(state.capacity for state in states)), node

    return decode_queue(min(nodes, key=load))
