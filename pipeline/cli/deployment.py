"""The processes of one machine as parts: commands, environments, and the order of their end."""

from __future__ import annotations

import base64
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path

from pipeline.cli.child import Child, Part, log_says
from pipeline.cli.data_directory import DataDirectory
from pipeline.cli.embedded_redis import EmbeddedRedis
from pipeline.cli.flower import flower_command
from pipeline.cli.interpreter import module_command, with_import_path
from pipeline.cli.model_store import ModelPlan
from pipeline.cli.serve_options import ServeOptions
from pipeline.ledger.keys import model_slug
from pipeline.settings import PREFIX

# Who ends first: nothing new comes in, then what runs is finished, then what it stood on.
GATEWAY_RANK, WORKER_RANK, KVD_RANK, FLOWER_RANK, REDIS_RANK = range(5)
# A part that keeps its own drain limit gets this much to close up before it is killed.
DRAIN_MARGIN_S = 5.0
# Workers of one machine share a GPU unless they are told otherwise.
_SHARE, _GPU_SHARE = "POINTSMAN_WORKER_HBM_SHARE", 0.9
# Read by the batch client; no server process owns it.
CLIENT_ONLY_NAMES = ("POINTSMAN_API_KEY",)
# Read as options of `serve`, so that the parts get what was meant, if in other words.
_OPTION_NAMES = (
    "POINTSMAN_DATA_DIR",
    "POINTSMAN_ENGINE",
    "POINTSMAN_GATEWAY_HOST",
    "POINTSMAN_GATEWAY_KEYS_FILE",
    "POINTSMAN_GATEWAY_MODELS",
    "POINTSMAN_GATEWAY_PORT",
    "POINTSMAN_MODEL",
    "POINTSMAN_REDIS_URL",
)


@dataclass(frozen=True, slots=True)
class Deployment:
    """Builds the parts of one `pointsman serve`.

    `num_resident` models have workers at once; None: all of them.
    """

    options: ServeOptions
    data_dir: DataDirectory
    redis_url: str
    kvd_socket: Path
    plans: tuple[ModelPlan, ...]
    flower_auth: str
    num_resident: int | None = None

    @property
    def model_name(self) -> str:
        """The model of the first calls that are shown."""
        return self.plans[0].name

    @property
    def base_url(self) -> str:
        """Where the gateway answers, as a client on this machine would write it."""
        host = self.options.host
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 (a look-up)
        scheme = "https" if os.environ.get("POINTSMAN_GATEWAY_TLS_CERT_FILE") else "http"
        return f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{self.options.port}"

    @property
    def flower_url(self) -> str:
        """Flower's page."""
        return f"http://127.0.0.1:{self.options.flower_port}"

    def kvd(self) -> Part:
        """The node's cache daemon."""
        env = {
            "POINTSMAN_KVD_DRAM_BYTES": str(self.options.kv_dram_bytes),
            "POINTSMAN_KVD_NVME_BYTES": str(self.options.kv_nvme_bytes),
            "POINTSMAN_KVD_NVME_PATH": str(self.data_dir.nvme_slab),
        }
        # At its end it writes the DRAM blocks to NVMe, in bounded time.
        return self._part(
            "kvd", module_command("tiering.kvd"), env, log_says("kvd_ready"), KVD_RANK, 20.0
        )

    def workers_of(self, plan: ModelPlan) -> list[Part]:
        """A model's workers; each gets its share of the cores, set before any library starts threads.

        Shared among those of as many models as can be resident at once; so is a GPU's memory.
        """
        return [
            self._worker(plan, role, index)
            for role, count in self.options.workers.items()
            for index in range(count)
        ]

    def _worker(self, plan: ModelPlan, role: str, index: int) -> Part:
        name = f"{role}-{index}"
        if len(self.plans) > 1:
            name = f"{model_slug(plan.name)}-{name}"
        num_threads = str(threads_per_worker(self._num_workers))
        env = {
            **_model_env(plan),
            "POINTSMAN_WORKER_ROLE": role,
            "POINTSMAN_WORKER_NAME": name,
            "POINTSMAN_WORKER_THREADS": num_threads,
            "POINTSMAN_WORKER_DRAIN_S": str(self.options.drain_s),
            "OMP_NUM_THREADS": num_threads,
            "MKL_NUM_THREADS": num_threads,
            # Idle OpenMP threads that spin take the cores from the other workers.
            "OMP_WAIT_POLICY": "passive",
            _SHARE: os.environ.get(_SHARE, f"{_GPU_SHARE / self._num_workers:.3f}"),
        }
        if plan is not self.plans[0]:
            env["POINTSMAN_MODEL_ALIASES"] = ""  # they are the first one's
        drain_s = self.options.drain_s + DRAIN_MARGIN_S
        ready = log_says("worker_ready")
        command = module_command("workers", name)  # the name is for those who look at processes
        part = self._part(name, command, env, ready, WORKER_RANK, drain_s)
        return replace(part, stays_down=log_says("worker_drained_for_good"))

    @property
    def _num_workers(self) -> int:
        """How many run at once."""
        num_models = len(self.plans) if self.num_resident is None else self.num_resident
        return sum(self.options.workers.values()) * max(1, num_models)

    def gateway(self) -> Part:
        """The HTTP server; ready when it says that it could serve a request."""
        env = {
            "POINTSMAN_GATEWAY_HOST": self.options.host,
            "POINTSMAN_GATEWAY_PORT": str(self.options.port),
            "POINTSMAN_GATEWAY_DRAIN_S": str(self.options.drain_s),
        }
        if len(self.plans) > 1:
            env["POINTSMAN_GATEWAY_MODELS"] = ",".join(self._further_models())
        if self.options.keys_file is not None:
            env["POINTSMAN_GATEWAY_KEYS_FILE"] = str(self.options.keys_file)
        return self._part(
            "gateway",
            module_command("gateway"),
            env,
            http_answers(f"{self.base_url}/readyz"),
            GATEWAY_RANK,
            self.options.drain_s + DRAIN_MARGIN_S,
        )

    def flower(self) -> Part:
        """The task view, on loopback and behind a password that stands in no command line."""
        env = {"FLOWER_BASIC_AUTH": self.flower_auth, "OMP_NUM_THREADS": "1"}
        port, db = self.options.flower_port or 0, self.data_dir.flower_db
        command = flower_command("127.0.0.1", port, db)
        answers = http_answers(f"{self.flower_url}/healthcheck")
        return self._part("flower", command, env, answers, FLOWER_RANK, 10.0)

    def redis(self, server: EmbeddedRedis) -> Part:
        """A Redis of our own; call `server.prepare()` first."""
        return Part(
            name="redis",
            command=server.command,
            env=dict(os.environ),
            is_ready=lambda _child: server.is_answering(),
            stop_rank=REDIS_RANK,
            drain_s=20.0,
        )

    def passed_over(self) -> list[str]:
        """Names in our environment whose values their parts do not get: `serve` decides these itself."""
        workers = [part for plan in self.plans for part in self.workers_of(plan)]
        owners = {"GATEWAY": [self.gateway()], "KVD": [self.kvd()], "WORKER": workers}
        return sorted(
            name
            for name, text in os.environ.items()
            if name.startswith(PREFIX)
            and name not in (*CLIENT_ONLY_NAMES, *_OPTION_NAMES)
            and all(part.env.get(name) != text for part in owners.get(name.split("_")[1], workers))
        )

    def _part(
        self,
        name: str,
        command: tuple[str, ...],
        env: Mapping[str, str],
        is_ready: Callable[[Child], bool],
        *end: float,
    ) -> Part:
        rank, drain_s = end
        return Part(name, command, {**self._shared_env(), **env}, is_ready, int(rank), drain_s)

    def _shared_env(self) -> dict[str, str]:
        env = {name: text for name, text in os.environ.items() if name not in CLIENT_ONLY_NAMES}
        env |= {
            "PYTHONUNBUFFERED": "1",
            "POINTSMAN_DATA_DIR": str(self.data_dir.path),
            "POINTSMAN_REDIS_URL": self.redis_url,
            "POINTSMAN_ENGINE": str(self.options.engine),
            "POINTSMAN_KVD_SOCKET": str(self.kvd_socket),
            **_model_env(self.plans[0]),
        }
        return with_import_path(env)

    def _further_models(self) -> list[str]:
        """For the gateway, behind those of its environment, so that it knows them without their workers."""
        given = os.environ.get("POINTSMAN_GATEWAY_MODELS")
        return [*([given] if given else []), *(f"{p.name}={p.path}" for p in self.plans[1:])]


def _model_env(plan: ModelPlan) -> dict[str, str]:
    env = {"POINTSMAN_MODEL_NAME": plan.name}
    return env if plan.path is None else env | {"POINTSMAN_MODEL": str(plan.path)}


def threads_per_worker(num_workers: int) -> int:
    """The cores this process may use, shared out; at least one each."""
    return max(1, len(os.sched_getaffinity(0)) // num_workers)


def http_answers(url: str) -> Callable[[Child], bool]:
    """Ready when the URL answers 200 within a second."""

    def asks(_child: Child) -> bool:
        return get_status(url, limit_s=1.0) == HTTPStatus.OK

    return asks


def get_status(url: str, *, limit_s: float, auth: str | None = None) -> int:
    """The status of a GET; 0 when nobody answers. `auth` is `user:password`.

    Only ever sent to a part of our own, so that a certificate proves nothing here.
    """
    request = urllib.request.Request(url)  # noqa: S310 (built from our own host and port)
    if auth is not None:
        request.add_header("Authorization", f"Basic {base64.b64encode(auth.encode()).decode()}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(request, timeout=limit_s) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def refresh_flower(deployment: Deployment) -> None:
    """Make Flower ask the workers for their queues; it only knows what it saw at its start."""
    url = f"{deployment.flower_url}/api/workers?refresh=1"
    get_status(url, limit_s=5.0, auth=deployment.flower_auth)
