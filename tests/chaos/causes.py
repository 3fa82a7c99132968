"""What can go wrong, done to a running pipeline, and how the pipeline is made whole again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import msgpack

from pipeline.cli.flower import flower_command
from pipeline.ledger.messages import broker_lists
from pipeline.ledger.store import connect
from pipeline.ledger.worker_ledger import LogWrite, WorkerLedger
from tests.flow.rig import REPOSITORY, Rig

Cause = Callable[[Rig], None]
Part = Callable[[Rig], str]

WORKERS = {
    "prefill-0": "prefill",
    "prefill-1": "prefill",
    "decode-0": "decode",
    "decode-1": "decode",
}


OTHER_NODE_WORKER = "both-b"
SECOND_GATEWAY = "gateway-b"


def start_flower(rig: Rig) -> None:
    """The task view, without a page: it asks the workers and listens to events as always."""
    _python, *command = flower_command("127.0.0.1", 0, None)
    rig.spawn("flower", *command, FLOWER_BASIC_AUTH="watch:word")


def revive(rig: Rig) -> None:
    """Start whatever does not run; a worker of another node goes."""
    if rig.redis_server.pid is None:
        rig.redis_server.start()
    if OTHER_NODE_WORKER in rig.processes:
        rig.terminate(OTHER_NODE_WORKER, 60.0)
        del rig.processes[OTHER_NODE_WORKER], rig.workers[OTHER_NODE_WORKER]
    for name, process in list(rig.processes.items()):
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
        else:
            _start(rig, name)
    for name in WORKERS:
        rig.wait_for_worker(name)


def _start(rig: Rig, name: str) -> None:
    if name == "kvd":
        rig.start_kvd()
    elif name == "flower":
        start_flower(rig)
    elif name in WORKERS:
        rig.start_worker(name, WORKERS[name])
    else:
        rig.start_gateway(name)


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


def away(seconds: float, *, keeps: bool = True) -> Cause:
    """Redis gone for a while; killed hard unless it `keeps` its last second."""

    def cause(rig: Rig) -> None:
        if keeps:
            rig.redis_server.stop()
        else:
            rig.redis_server.kill()
        time.sleep(seconds)
        rig.redis_server.start()

    return cause


def forgetful(seconds: float) -> Cause:
    """Redis killed, and started again without its last writes, as after a failover to a replica."""

    def cause(rig: Rig) -> None:
        log = rig.folder / "redis" / "appendonlydir"
        kept = rig.folder / "redis" / "kept"
        shutil.copytree(log, kept)
        time.sleep(seconds)
        rig.redis_server.kill()
        shutil.rmtree(log)
        kept.rename(log)
        rig.redis_server.start()

    return cause


def frozen(part: Part, seconds: float | None) -> Cause:
    """SIGSTOP, and SIGCONT after a while, or when the load is over."""

    def cause(rig: Rig) -> None:
        name = part(rig)
        rig.freeze(name)
        if seconds is not None:
            time.sleep(seconds)
            rig.thaw(name)

    return cause


def redis_frozen(seconds: float) -> Cause:
    """Redis accepts connections and answers nothing."""

    def cause(rig: Rig) -> None:
        pid = rig.redis_server.pid
        if pid is None:
            raise RuntimeError("Redis does not run")
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    return cause


def configured(name: str, value: str, back: str, seconds: float) -> Cause:
    """A Redis setting changed for a while."""

    def cause(rig: Rig) -> None:
        rig.redis.config_set(name, value)
        time.sleep(seconds)
        rig.redis.config_set(name, back)

    return cause


def read_only(seconds: float) -> Cause:
    """Redis becomes the replica of nobody for a while."""

    def cause(rig: Rig) -> None:
        rig.redis.execute_command("REPLICAOF", "127.0.0.1", "1")
        time.sleep(seconds)
        rig.redis.execute_command("REPLICAOF", "NO", "ONE")

    return cause


def all_workers_gone(seconds: float) -> Cause:
    """SIGKILL to each; all come back later."""

    def cause(rig: Rig) -> None:
        for name in WORKERS:
            rig.kill(name)
        time.sleep(seconds)
        for name, role in WORKERS.items():
            rig.start_worker(name, role)

    return cause


def node_drained(rig: Rig) -> None:
    """`pointsman drain` while a worker of another node is there."""
    rig.start_worker(OTHER_NODE_WORKER, "both", POINTSMAN_NODE="node-b")
    rig.wait_for_worker(OTHER_NODE_WORKER)
    subprocess.run(
        [sys.executable, "-m", "pipeline.cli.main", "drain", "node-a"],
        env=rig.environment(),
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        timeout=120,
        check=True,
    )


def lossy_policy(rig: Rig) -> None:
    """Redis is told that it may evict; whoever starts then must refuse to."""
    rig.redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        rig.start_worker(OTHER_NODE_WORKER, "both", POINTSMAN_NODE="node-b")
        status = rig.processes[OTHER_NODE_WORKER].wait(60)
    finally:
        rig.redis.config_set("maxmemory-policy", "noeviction")
    if status != 2:
        raise RuntimeError(f"a worker started on a Redis that may evict: {status}")


def messages_dropped(rig: Rig) -> None:
    for queue in ("prefill.m", "decode.m.node-a"):
        rig.redis.delete(*broker_lists(queue))


def messages_doubled(rig: Rig) -> None:
    for queue in ("prefill.m", "decode.m.node-a"):
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
        ledger.hand_over(name, "nobody@nowhere#0", 1, "decode.m.nowhere", None)
        ledger.requeue_lost(name, "nobody@nowhere#0", "decode.m.nowhere")


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


def named(name: str) -> Part:
    """The part of this name."""
    return lambda _rig: name


def decode_worker(rig: Rig) -> str:
    """A decode worker, if possible a busy one."""
    return busy(rig, "decode")


def prefill_worker(rig: Rig) -> str:
    """A prefill worker, if possible a busy one."""
    return busy(rig, "prefill")


def killed(part: Part) -> Cause:
    """SIGKILL."""
    return lambda rig: rig.kill(part(rig))


def stopped(part: Part) -> Cause:
    """SIGTERM; waits until the part has ended."""

    def cause(rig: Rig) -> None:
        name = part(rig)
        status = rig.terminate(name, 60.0)
        if status != 0:
            raise RuntimeError(f"{name} ended with {status}")

    return cause
