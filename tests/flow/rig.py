"""Whole pipelines of real processes on loopback, to be started, killed, frozen and asked."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgpack
import redis

from pipeline.cli.embedded_redis import EmbeddedRedis, free_port

START_LIMIT_S = 90.0
REPOSITORY = Path(__file__).resolve().parents[2]


def wait_until(condition: Callable[[], Any], limit_s: float = 10.0, what: str = "") -> Any:
    """Poll until a condition holds; its value."""
    deadline_s = time.monotonic() + limit_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {limit_s} s: {what or condition}")
        time.sleep(0.02)


@dataclass
class Rig:
    """One pipeline. Parts are named `redis`, `kvd`, `gateway`, and as the workers are."""

    folder: Path
    engine: str = "digest"
    model: Path | None = None
    workers: dict[str, str] = field(
        default_factory=lambda: {"prefill-0": "prefill", "decode-0": "decode"}
    )
    env: dict[str, str] = field(default_factory=dict)
    has_kvd: bool = True
    persistent: bool = True
    tls: ssl.SSLContext | None = None  # how to verify a gateway that speaks HTTPS
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    log_starts: dict[str, int] = field(default_factory=dict)  # where a part's present life begins

    def __post_init__(self) -> None:
        self.redis_server = EmbeddedRedis(self.folder / "redis", persistent=self.persistent)
        self.port = free_port()
        self.gateway_ports = {"gateway": self.port}
        self.base_url = self.url_on(self.port)
        self.kvd_socket = self.folder / "kvd.sock"
        self._redis: redis.Redis | None = None

    def url_on(self, port: int) -> str:
        """Of a gateway on loopback."""
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{port}"

    @property
    def redis(self) -> Any:
        """A client of the pipeline's Redis."""
        if self._redis is None:
            self._redis = redis.Redis.from_url(self.redis_server.url)
        return self._redis

    def start(self) -> Rig:
        """Start everything and wait until it serves."""
        self.redis_server.start()
        if self.has_kvd:
            self.start_kvd()
        for name, role in self.workers.items():
            self.start_worker(name, role)
        self.start_gateway()
        for name in self.workers:
            self.wait_for_worker(name)
        if any(role != "prefill" for role in self.workers.values()):
            self.wait_ready()
        else:
            self._wait_known()
        return self

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a part."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("POINTSMAN_")}
        env |= {
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "POINTSMAN_REDIS_URL": self.redis_server.url,
            "POINTSMAN_NODE": "node-a",
            "POINTSMAN_ENGINE": self.engine,
            "POINTSMAN_MODEL_NAME": "m",
            "POINTSMAN_DATA_DIR": str(self.folder),
            "POINTSMAN_LOG_FORMAT": "json",
            "POINTSMAN_GATEWAY_METRICS_NEED_KEY": "false",
            # Tests count steps and tokens: nothing runs but what they ask for.
            "POINTSMAN_WORKER_CANARY_IDLE_S": "0",
            # The test engines compute faster than anything loads: by cost they would load nothing.
            "POINTSMAN_WORKER_LOADS": "always",
        }
        if self.model is not None:
            env["POINTSMAN_MODEL"] = str(self.model)
        if self.has_kvd:
            env["POINTSMAN_KVD_SOCKET"] = str(self.kvd_socket)
        return env | self.env | more

    def spawn(self, name: str, *command: str, **env: str) -> None:
        """Start a part; its output goes to `<name>.log`."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.log_starts[name] = log.tell()
            self.processes[name] = subprocess.Popen(
                [sys.executable, *command],
                env=self.environment(**env),
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    def start_kvd(self) -> None:
        """Start the cache daemon and wait for its socket."""
        self.spawn(
            "kvd",
            "-m",
            "tiering.kvd",
            **{
                "POINTSMAN_KVD_DRAM_BYTES": str(16 * 2**20),
                "POINTSMAN_KVD_NVME_BYTES": str(32 * 2**20),
                "POINTSMAN_KVD_NVME_PATH": str(self.folder / "kv.slab"),
            }
            | {k: v for k, v in self.env.items() if k.startswith("POINTSMAN_KVD_")},
        )
        wait_until(self.kvd_socket.exists, START_LIMIT_S, "kvd")

    def start_worker(self, name: str, role: str, **env: str) -> None:
        """Start a worker."""
        self.workers[name] = role
        self.spawn(
            name,
            "-m",
            "workers",
            POINTSMAN_WORKER_ROLE=role,
            POINTSMAN_WORKER_NAME=name,
            **env,
        )

    def start_gateway(self, name: str = "gateway", port: int | None = None) -> None:
        """Start a gateway: on this port, or where it was before, or on the rig's."""
        port = self.gateway_ports[name] = port or self.gateway_ports.get(name, self.port)
        self.spawn(
            name,
            "-m",
            "gateway",
            POINTSMAN_GATEWAY_HOST="127.0.0.1",
            POINTSMAN_GATEWAY_PORT=str(port),
        )
        url = f"{self.url_on(port)}/livez"
        wait_until(
            lambda: self._answers(name, url), START_LIMIT_S, f"{name}: {self.log(name)[-2000:]}"
        )

    def _answers(self, name: str, url: str) -> bool:
        if self.processes[name].poll() is not None:
            raise RuntimeError(f"{name} ended: {self.log(name)[-3000:]}")
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(url, timeout=2, verify=self.tls or True).status_code == 200
        return False

    def wait_ready(self) -> None:
        """Wait until the gateway says that it can serve, by all workers that run."""
        wait_until(
            lambda: self._answers("gateway", f"{self.base_url}/readyz"), START_LIMIT_S, "readyz"
        )
        self._wait_known()

    def _wait_known(self) -> None:
        """Wait until the gateway has seen them: until then it sends them no work.

        It looks for them twice a second; a decode worker seen first computes prompts itself.
        """
        running = [name for name in self.workers if self.processes[name].poll() is None]
        wait_until(
            lambda: self._knows(running),
            START_LIMIT_S,
            f"the gateway knows {running}",
        )

    def wait_for_worker(self, name: str) -> None:
        """Wait until a worker's consumer is up."""

        def is_up() -> bool:
            if self.processes[name].poll() is not None:
                raise RuntimeError(f"{name} ended: {self.log(name)[-3000:]}")
            written = (self.folder / f"{name}.log").read_bytes()
            return b"worker_ready" in written[self.log_starts[name] :]

        wait_until(is_up, START_LIMIT_S, name)

    def log(self, name: str) -> str:
        """What a part has written so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a part."""
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """SIGKILL."""
        self.processes[name].kill()
        self.processes[name].wait()

    def freeze(self, name: str) -> None:
        """SIGSTOP."""
        self.signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """SIGCONT."""
        self.signal(name, signal.SIGCONT)

    def terminate(self, name: str, limit_s: float = 30.0) -> int:
        """SIGTERM, and the exit status."""
        self.processes[name].terminate()
        return self.processes[name].wait(limit_s)

    def beats(self) -> dict[str, dict[str, Any]]:
        """The last heartbeat of each worker, by its full name."""
        beats = {}
        for name, beat in self.redis.hgetall("workers").items():
            _, state = msgpack.unpackb(beat, raw=True)
            beats[name.decode()] = json.loads(state)
        return beats

    def request_fields(self, request_id: str) -> dict[str, str]:
        """The ledger's hash of a request, without its binary parts."""
        fields = self.redis.hgetall(f"request:{request_id}")
        return {k.decode(): v.decode(errors="replace") for k, v in fields.items() if k != b"prompt"}

    def is_at_rest(self) -> bool:
        """No request is open and no worker holds a block for a sequence."""
        return not self.redis.zcard("deadlines") and all(
            sum(state.get(name, 0) for name in ("num_used_blocks", "num_running", "num_waiting"))
            == 0
            for state in self.beats().values()
        )

    def wait_at_rest(self, limit_s: float = 10.0) -> None:
        """Wait until nothing runs any more."""
        wait_until(self.is_at_rest, limit_s, f"at rest: {self.beats()}")

    def metric(self, name: str) -> float:
        """Sum of a metric's series on the gateway."""
        lines = self._metrics().splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)]
        return sum(values)

    def _knows(self, workers: Collection[str]) -> bool:
        metrics = self._metrics()
        return all(f'worker="{name}@' in metrics for name in workers)

    def _metrics(self) -> str:
        return httpx.get(f"{self.base_url}/metrics", timeout=5, verify=self.tls or True).text

    def close(self) -> None:
        """End everything that was started, by process id."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
        if self._redis is not None:
            self._redis.close()
        self.redis_server.stop()
