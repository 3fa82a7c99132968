"""Names of everything that the ledger keeps in Redis.

The Lua scripts build the same names; `lua/common.lua` is their other half.
"""

from __future__ import annotations

WORKERS = "workers"
WEBHOOKS = "webhooks"
QUEUES = "queues"
DEADLINES = "deadlines"
LEADER = "leader"
DEAD_LETTERS = "dead_letters"
COUNTERS = "counters"
HELD = "held"
FAULTS = "faults"
SLOTS = "slots"
DRAINS = "drains"
LINKS = "links"

PREFILL_QUEUE = "prefill"
UNPLACED_QUEUE = "unplaced"
_DECODE_PREFIX = "decode."


def decode_queue(node: str) -> str:
    """The queue of a node's decode workers."""
    return f"{_DECODE_PREFIX}{node}"


def is_decode_queue(queue: str) -> bool:
    """True for the queue of a node's decode workers."""
    return queue.startswith(_DECODE_PREFIX)


def request_key(request_id: str) -> str:
    """Hash of one request."""
    return f"request:{request_id}"


def tokens_key(request_id: str) -> str:
    """Token log of one request: fixed-size records (pipeline.protocol.tokens)."""
    return f"tokens:{request_id}"


def scores_key(request_id: str) -> str:
    """Log-probabilities of a request's prompt: a record for each of its tokens but the first."""
    return f"prompt_logprobs:{request_id}"


def waiting_key(queue: str) -> str:
    """Sorted set of request ids that wait in a queue, by the time they were put there."""
    return f"waiting:{queue}"


def released_key(queue: str, priority: int) -> str:
    """Sorted set of waiting request ids whose message was sent, by the time of that."""
    return f"released:{queue}:{priority}"


def running_key(worker: str) -> str:
    """Set of request ids that a worker owns."""
    return f"running:{worker}"


def lease_key(worker: str) -> str:
    """Exists while the worker is alive."""
    return f"lease:{worker}"


def cancels_key(worker: str) -> str:
    """Set of request ids that the worker must stop."""
    return f"cancels:{worker}"


def control_channel(worker: str) -> str:
    """Channel on which a worker hears of cancellations at once."""
    return f"control:{worker}"


def gateway_channel(gateway: str) -> str:
    """Channel on which a gateway process hears of all its requests' tokens."""
    return f"gateway:{gateway}"


def jobs_key(tenant: str) -> str:
    """Sorted set of a tenant's newest jobs, by the time of their submission."""
    return f"jobs:{tenant}"


def frontier_key(queue: str, priority: int) -> str:
    """When the youngest claimed request of a queue and priority had been released."""
    return f"frontier:{queue}:{priority}"


def node_key(node: str) -> str:
    """What a node's cache daemon last told; runs out when nobody asks it any more."""
    return f"node:{node}"
