"""What can go wrong, and how it is mended again. Each fault acts on a running pipeline."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgpack

from pipeline.ledger.overview import broker_lists
from pipeline.ledger.store import connect
from pipeline.ledger.worker_ledger import LogWrite, WorkerLedger
from tests.flow.rig import Rig

WORKERS = {
    "prefill-0": "prefill",
    "prefill-1": "prefill",
    "decode-0": "decode",
    "decode-1": "decode",
}


@dataclass(frozen=True)
class Fault:
    """`cause` returns when the fault is over or as far as it goes; `mend` makes the rig whole."""

    name: str
    cause: Callable[[Rig], None]
    mend: Callable[[Rig], None]


def revive(rig: Rig) -> None:
    """Start whatever does not run."""
    if rig.redis_server.pid is None:
        rig.redis_server.start()
    for name, process in list(rig.processes.items()):
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
        elif name == "kvd":
            rig.start_kvd()
        elif name.startswith("gateway"):
            rig.start_gateway(name, rig.port + 1 if name == "gateway-b" else None)
        elif name in WORKERS:
            rig.start_worker(name, WORKERS[name])
    for name in WORKERS:
        rig.wait_for_worker(name)


def busy(rig: Rig, role: str) -> str:
    """A worker of a role that owns requests, else the first."""
    for name in WORKERS:
        for key in rig.redis.scan_iter(f"running:{name}@*"):
            if name.startswith(role) and rig.redis.scard(key):
                return name
    return f"{role}-0"


def leader(rig: Rig) -> str:
    """The part whose upkeep leads now."""
    name = (rig.redis.get("leader") or b"").decode()
    part = name.partition("@")[0]
    if part in rig.processes:
        return part
    pids = {str(process.pid): part for part, process in rig.processes.items()}
    return next((part for pid, part in pids.items() if f"-{pid}-" in name), "gateway")


def away(seconds: float, *, keeps: bool = True) -> Callable[[Rig], None]:
    """Redis gone for a while; killed hard unless it `keeps` its last second."""

    def cause(rig: Rig) -> None:
        if keeps:
            rig.redis_server.stop()
        else:
            rig.redis_server.kill()
        time.sleep(seconds)
        rig.redis_server.start()

    return cause


def frozen(part: Callable[[Rig], str], seconds: float | None) -> Callable[[Rig], None]:
    """SIGSTOP, and SIGCONT after a while or never."""

    def cause(rig: Rig) -> None:
        name = part(rig)
        rig.freeze(name)
        if seconds is not None:
            time.sleep(seconds)
            rig.thaw(name)

    return cause


def configured(name: str, value: str, back: str, seconds: float) -> Callable[[Rig], None]:
    """A Redis setting changed for a while."""

    def cause(rig: Rig) -> None:
        rig.redis.config_set(name, value)
        time.sleep(seconds)
        rig.redis.config_set(name, back)

    return cause


def all_workers_gone(rig: Rig) -> None:
    for name in WORKERS:
        rig.kill(name)
    time.sleep(10)
    for name, role in WORKERS.items():
        rig.start_worker(name, role)


def messages_dropped(rig: Rig) -> None:
    for queue in ("prefill", "decode.node-a"):
        rig.redis.delete(*broker_lists(queue))


def messages_doubled(rig: Rig) -> None:
    for queue in ("prefill", "decode.node-a"):
        for name in broker_lists(queue):
            for message in rig.redis.lrange(name, 0, -1):
                rig.redis.lpush(name, message)


def stale_writes(rig: Rig) -> None:
    """Tokens and hand-overs of attempts that never were, by hand, for every open request."""
    ledger = WorkerLedger(connect(rig.redis_server.url), max_attempts=3, retention_s=60)
    ids = [name.decode() for name in rig.redis.zrange("deadlines", 0, -1)]
    writes = [LogWrite(name, 1, 0, b"\x00" * 8, "stop", 0) for name in ids]
    ledger.write_step("nobody@nowhere#0", writes)
    for name in ids:
        ledger.hand_over(name, "nobody@nowhere#0", 1, "decode.nowhere", None)
        ledger.requeue_lost(name, "nobody@nowhere#0", "decode.nowhere")


def subscriptions_cut(rig: Rig) -> None:
    for _ in range(5):
        rig.redis.client_kill_filter(_type="pubsub")
        time.sleep(0.1)


def strange_worker(rig: Rig) -> None:
    """A build that speaks of roles we do not know joins and beats."""
    state = json.dumps({"role": "oracle", "worker": "new@node-z#1"}).encode()
    now_ms = int(rig.redis.time()[0]) * 1000
    rig.redis.set("lease:new@node-z#1", "1", px=4000)
    rig.redis.hset("workers", "new@node-z#1", msgpack.packb([now_ms, state]))


def _named(name: str) -> Callable[[Rig], str]:
    return lambda _rig: name


def _kill(part: Callable[[Rig], str]) -> Callable[[Rig], None]:
    return lambda rig: rig.kill(part(rig))


def _stop(part: Callable[[Rig], str]) -> Callable[[Rig], None]:
    def cause(rig: Rig) -> None:
        rig.terminate(part(rig), 60.0)

    return cause


def _decode(rig: Rig) -> str:
    return busy(rig, "decode")


def _prefill(rig: Rig) -> str:
    return busy(rig, "prefill")


_PARTS: dict[str, Callable[[Rig], str]] = {
    "gateway": _named("gateway"),
    "prefill worker": _prefill,
    "decode worker": _decode,
    "kvd": _named("kvd"),
    "upkeep leader": leader,
}

FAULTS = [
    *(Fault(f"SIGKILL {name}", _kill(part), revive) for name, part in _PARTS.items()),
    *(Fault(f"SIGTERM {name}", _stop(part), revive) for name, part in _PARTS.items()),
    *(Fault(f"SIGSTOP 8 s {name}", frozen(part, 8.0), revive) for name, part in _PARTS.items()),
    Fault("SIGSTOP for ever, decode worker", frozen(_decode, None), revive),
    Fault("SIGSTOP for ever, prefill worker", frozen(_prefill, None), revive),
    Fault("Redis away 0.5 s", away(0.5), revive),
    Fault("Redis away 3 s", away(3.0), revive),
    Fault("Redis away 30 s", away(30.0), revive),
    Fault("Redis SIGKILL, away 1 s", away(1.0, keeps=False), revive),
    Fault("Redis refuses writes 3 s", configured("min-replicas-to-write", "1", "0", 3.0), revive),
    Fault("Redis full 3 s", configured("maxmemory", "1", "0", 3.0), revive),
    Fault("all workers gone 10 s", all_workers_gone, revive),
    Fault("broker messages dropped", messages_dropped, revive),
    Fault("broker messages doubled", messages_doubled, revive),
    Fault("stale writes by hand", stale_writes, revive),
    Fault("subscriptions cut 5 times", subscriptions_cut, revive),
    Fault("a strange build joins", strange_worker, revive),
]
