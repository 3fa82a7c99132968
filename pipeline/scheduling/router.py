"""Which queue a request waits in. Models are named by their slug; each has workers of its own."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.ledger.keys import prefill_queue, unplaced_queue
from pipeline.scheduling.fleet import Fleet, WorkerState, by_decode_queue, find_unpaired


def choose_entry(fleet: Fleet, slug: str) -> str:
    """The first queue of a new or recovered request to a model.

    Without a decode worker nobody could finish it: it waits unplaced, and no prefill is spent on it.
    Without a prefill worker a decode node computes the prompt itself. So it does while some prefill
    worker is not paired with a decode node: the queue is shared, and what that worker computed would
    be of no use.
    """
    usable = fleet.usable(slug)
    decode = _roomiest(usable, None)
    if decode is None:
        return unplaced_queue(slug)
    has_prefill = any(state.can_prefill for state in usable)
    return prefill_queue(slug) if has_prefill and not find_unpaired(usable) else decode


def choose_decode(fleet: Fleet, slug: str, namespace: str | None = None) -> str | None:
    """The model's decode queue on the least loaded node, None if no node decodes it.

    Load is occupied places per place; names break ties, so that all routers agree. With a
    `namespace`, only nodes whose KV blocks are interchangeable with it count.
    """
    return _roomiest(fleet.usable(slug), namespace)


def _roomiest(usable: Iterable[WorkerState], namespace: str | None) -> str | None:
    queues = {
        queue: states
        for queue, states in by_decode_queue(usable).items()
        if namespace is None or all(state.namespace == namespace for state in states)
    }

    def load(queue: str) -> tuple[float, str]:
        states = queues[queue]
        busy = sum(state.num_running + state.num_waiting for state in states)
        return busy / max(1, sum(state.capacity for state in states)), queue

    return min(queues, key=load, default=None)
