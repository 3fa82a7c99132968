"""The fault matrix: every fault by its name, and how long recovery from it may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos import causes
from tests.chaos.causes import Cause, Part

WORKER_LIMIT_S = 6.0
REDIS_LIMIT_S = 10.0


@dataclass(frozen=True)
class Fault:
    """`cause` returns when the fault is over or as far as it goes.

    limit_s: the most that recovery may take from then on; None where the fault sets no time.
    """

    name: str
    cause: Cause
    limit_s: float | None = None


_WORKERS: dict[str, Part] = {
    "prefill worker": causes.prefill_worker,
    "decode worker": causes.decode_worker,
}
_PARTS: dict[str, Part] = {
    "gateway": causes.named("gateway"),
    **_WORKERS,
    "kvd": causes.named("kvd"),
    "Flower": causes.named("flower"),
    "upkeep leader": causes.leader,
}


def _each(what: str, make: Callable[[Part], Cause], parts: dict[str, Part]) -> list[Fault]:
    return [
        Fault(f"{what} {name}", make(part), WORKER_LIMIT_S if "worker" in name else None)
        for name, part in parts.items()
    ]


FAULTS = [
    *_each("SIGKILL", causes.killed, _PARTS),
    *_each("SIGTERM", causes.stopped, _PARTS),
    *_each("SIGSTOP 8 s", lambda part: causes.frozen(part, 8.0), _PARTS),
    Fault("SIGSTOP 8 s Redis", causes.redis_frozen(8.0), REDIS_LIMIT_S),
    *_each("SIGSTOP for ever", lambda part: causes.frozen(part, None), _PARTS),
    Fault("node drained", causes.node_drained),
    Fault("Redis away 0.5 s", causes.away(0.5), REDIS_LIMIT_S),
    Fault("Redis away 3 s", causes.away(3.0), REDIS_LIMIT_S),
    Fault("Redis away 30 s", causes.away(30.0), REDIS_LIMIT_S),
    Fault("Redis SIGKILL, away 1 s", causes.away(1.0, keeps=False), REDIS_LIMIT_S),
    Fault("Redis forgets its last second", causes.forgetful(1.0), REDIS_LIMIT_S),
    Fault(
        "Redis lacks replicas 3 s",
        causes.configured("min-replicas-to-write", "1", "0", 3.0),
        REDIS_LIMIT_S,
    ),
    Fault("Redis read-only 3 s", causes.read_only(3.0), REDIS_LIMIT_S),
    Fault("Redis full 3 s", causes.configured("maxmemory", "1", "0", 3.0), REDIS_LIMIT_S),
    Fault("Redis may evict, a worker joins", causes.lossy_policy),
    Fault("all workers gone 30 s", causes.all_workers_gone(30.0)),
    Fault("broker messages dropped", causes.messages_dropped),
    Fault("broker messages doubled", causes.messages_doubled),
    Fault("stale writes by hand", causes.stale_writes),
    Fault("subscriptions cut 5 times", causes.subscriptions_cut),
    Fault("a strange build joins", causes.strange_worker),
]
