"""What the tier benches share: the real model's engine, a cache daemon, and sequences timed to the token."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

# Read when torch is loaded, and set by the worker's root too: OpenMP threads that wait by spinning take
# the core that kvd and the mover need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch

from pipeline.protocol.sampling import SamplingParams
from pipeline.scheduling.transfer_cost import LoadPolicy
from tiering.block_hash import namespace_root
from tiering.errors import TieringError
from tiering.kvd.client import KvdClient
from workers.kv_jobs import NoCache
from workers.kv_mover import KvdMover
from workers.models.convert import convert, packaged_gguf
from workers.models.load import load_runner
from workers.sequence import Sequence, StepOutput
from workers.settings import EngineSettings
from workers.step_loop import Engine

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pointsman-bench"
KEY_ROOT = namespace_root({"bench": "tiers"})
WAIT_S = 600.0


def real_model() -> Path:
    """The directory of the packaged model, converted once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    directory = CACHE / "smollm2"
    convert(packaged_gguf(), directory, lambda *_: None)
    return directory


def use_threads(count: int) -> None:
    """How many of them the model computes with."""
    torch.set_num_threads(count)


def random_tokens(seed: int, count: int) -> list[int]:
    """Ids that no other seed repeats."""
    ids: list[int] = np.random.default_rng(seed).integers(20, 49_000, count).tolist()
    return ids


@dataclass
class Daemon:
    """A cache daemon process of the bench's own."""

    folder: Path
    dram_bytes: int
    nvme_bytes: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket_path(self) -> Path:
        """Where it listens."""
        return self.folder / "kvd.sock"

    def start(self, block_bytes: int) -> None:
        """Start and wait until it answers."""
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "POINTSMAN_KVD_SOCKET": str(self.socket_path),
            "POINTSMAN_KVD_DRAM_BYTES": str(self.dram_bytes),
            "POINTSMAN_KVD_NVME_BYTES": str(self.nvme_bytes),
            "POINTSMAN_KVD_NVME_PATH": str(self.folder / "kv.slab"),
        }
        command = [sys.executable, "-m", "tiering.kvd"]
        self.process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL
        )
        limit_s = time.monotonic() + 60
        while True:
            probe = KvdClient(self.socket_path, block_bytes, "probe")
            try:
                probe.connect()
            except TieringError:
                if time.monotonic() > limit_s or self.process.poll() is not None:
                    raise
                time.sleep(0.02)
            else:
                probe.close()
                return

    def end(self) -> None:
        """Stop; what only DRAM has goes to the disk first."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(WAIT_S)
            self.process = None


@dataclass
class TimedSink:
    """Tokens and the time of the first one, by request."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def on_admitted(self, sequence: Sequence) -> None:
        """See `EngineSink`."""

    def on_prefilled(self, sequence: Sequence) -> None:
        """See `EngineSink`; nothing is handed over."""

    def on_step(self, outputs: list[StepOutput]) -> None:
        """See `EngineSink`."""
        now_s = time.perf_counter()
        with self.changed:
            for output in outputs:
                name = output.sequence.request_id
                if output.record is not None:
                    self.tokens.setdefault(name, []).append(output.record.token_id)
                    self.first_s.setdefault(name, now_s)
                if output.ending is not None:
                    self.ended.add(name)
            self.changed.notify_all()


class TierEngine:
    """One engine over the real model; `daemon` None: HBM is the only tier. `mover`: what moves blocks."""

    def __init__(
        self,
        model: Path,
        daemon: Daemon | None,
        settings: EngineSettings,
        dtype: str = "float32",
        policy: LoadPolicy = LoadPolicy.COST,
        mover: type[KvdMover] = KvdMover,
    ) -> None:
        self.sink = TimedSink()
        self._daemon = daemon
        runner = load_runner("torch", model, dtype=dtype)
        self.block_bytes = runner.spec.layout.block_bytes
        tiers: KvdMover | NoCache = NoCache()
        if daemon is not None:
            daemon.start(self.block_bytes)
            tiers = mover(self._client, max_pending_blocks=256, policy=policy)
        self.engine = Engine(runner, settings, tiers, self.sink, lambda _: None)
        self.engine.start()
        self.engine.ready.wait()

    def _client(self) -> KvdClient:
        if self._daemon is None:
            raise ValueError("an engine without a daemon has no client")
        return KvdClient(self._daemon.socket_path, self.block_bytes, "bench")

    def submit(self, name: str, prompt: list[int], num_tokens: int) -> Sequence:
        """A greedy request of exactly so many tokens."""
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        sequence = Sequence(name, 1, list(prompt), len(prompt), sampling, KEY_ROOT)
        self.engine.submit(sequence)
        return sequence

    def wait(self, *names: str, any_of: bool = False) -> None:
        """Until all of these have ended, or one of them."""
        rule = any if any_of else all
        with self.sink.changed:
            is_met = self.sink.changed.wait_for(
                lambda: rule(name in self.sink.ended for name in names), WAIT_S
            )
        if not is_met:
            raise TimeoutError(f"{len(names)} requests did not end")

    def wait_at_rest(self) -> None:
        """Until everything is written through."""
        limit_s = time.monotonic() + WAIT_S
        while self.engine.stats().used_blocks:
            if time.monotonic() > limit_s:
                raise TimeoutError("blocks stay in use")
            time.sleep(0.005)

    def stop(self) -> None:
        """End the engine, and its daemon."""
        self.engine.stop(5)
        if self._daemon is not None:
            self._daemon.end()
