"""Names of everything that the ledger keeps in Redis.

The Lua scripts build the same names; `lua/common.lua` is their other half.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

WORKERS = "workers"
WEBHOOKS = "webhooks"
QUEUES = "queues"
DEADLINES = "deadlines"
LEADER = "leader"
DEAD_LETTERS = "dead_letters"
COUNTERS = "counters"
FAULTS = "faults"
SLOTS = "slots"
DRAINS = "drains"
LINKS = "links"

_PREFILL, _DECODE, _UNPLACED = "prefill", "decode", "unplaced"
_QUEUE = re.compile(rf"{_DECODE}\.([\w-]+)\..+|(?:{_PREFILL}|{_UNPLACED})\.([\w-]+)", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9-]{1,48}")
_NO_WORD = re.compile(r"[^A-Za-z0-9-]")
_MAX_SHOWN_CHARS = 40


@lru_cache(maxsize=256)
def model_slug(model: str) -> str:
    """A model's name as it stands in names of queues and keys: a word of letters, digits and -.

    Another name has the rest replaced and, behind a _, a digest, so that no two have one slug.
    """
    if _WORD.fullmatch(model):
        return model
    digest = hashlib.sha256(model.encode()).hexdigest()[:8]
    return f"{_NO_WORD.sub('-', model)[:_MAX_SHOWN_CHARS]}_{digest}"


def prefill_queue(slug: str) -> str:
    """The queue that all prefill workers of a model share."""
    return f"{_PREFILL}.{slug}"


def decode_queue(slug: str, node: str) -> str:
    """The queue of a node's decode workers of a model."""
    return f"{_DECODE}.{slug}.{node}"


def unplaced_queue(slug: str) -> str:
    """Where requests to a model wait that nobody serves; it has no messages."""
    return f"{_UNPLACED}.{slug}"


def is_decode_queue(queue: str) -> bool:
    """True for the queue of a node's decode workers."""
    return queue.startswith(f"{_DECODE}.")


def is_unplaced_queue(queue: str) -> bool:
    """True where requests wait that have no worker."""
    return queue.partition(".")[0] == _UNPLACED


def slug_of(queue: str) -> str:
    """The slug of the queue's model; empty for a queue of the time when there was one model."""
    match = _QUEUE.fullmatch(queue)
    return match[1] or match[2] if match else ""


def held_key(slug: str) -> str:
    """Set of a model's request ids that wait in their tenant's line, without a message."""
    return f"held:{slug}" if slug else "held"


def open_key(slug: str) -> str:
    """Sorted set of a model's request ids that have not ended, by their deadline."""
    return f"open:model:{slug}"


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
