"""Real engines over the digest model, a real cache daemon, and a sink that remembers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline.protocol.failure import Ending
from pipeline.protocol.request import Priority
from pipeline.protocol.sampling import SamplingParams
from pipeline.scheduling.transfer_cost import LoadPolicy
from tiering.block_hash import namespace_root
from tiering.kvd.client import KvdClient
from workers.engine_stats import EngineStats
from workers.kv_jobs import KvMover, NoCache
from workers.kv_mover import KvdMover
from workers.model import Float32Array, ModelRunner, StepBatch
from workers.models.digest import DigestRunner
from workers.sequence import Sequence, StepOutput
from workers.settings import EngineSettings
from workers.step_loop import Engine
from workers.stop_matching import StopMatcherFactory

BLOCK_BYTES = 512
LIMIT_S = 30.0
ROOT = namespace_root({"test": "engine"})


class RecordingSink:
    """An `EngineSink` that keeps everything and can be waited on."""

    def __init__(self) -> None:
        self.tokens: dict[Sequence, list[int]] = {}
        self.endings: dict[Sequence, Ending] = {}
        self.admitted: list[Sequence] = []
        self.prefilled: list[Sequence] = []
        self.steps: list[list[StepOutput]] = []
        self.on_token: Callable[[Sequence], None] | None = None
        self._changed = threading.Condition()

    def on_admitted(self, sequence: Sequence) -> None:
        with self._changed:
            self.admitted.append(sequence)
            self._changed.notify_all()

    def on_step(self, outputs: list[StepOutput]) -> None:
        with self._changed:
            self.steps.append(outputs)
            for output in outputs:
                assert output.sequence not in self.endings, "output after the ending"
                tokens = self.tokens.setdefault(output.sequence, [])
                if output.record is not None:
                    first = output.sequence.num_logged
                    assert output.index == first + len(tokens), "an index was passed over"
                    tokens.append(output.record.token_id)
                if output.ending is not None:
                    self.endings[output.sequence] = output.ending
            self._changed.notify_all()
        if self.on_token is not None:
            for output in outputs:
                self.on_token(output.sequence)

    def on_prefilled(self, sequence: Sequence) -> None:
        with self._changed:
            assert sequence not in self.endings
            assert self.tokens[sequence]
            self.prefilled.append(sequence)
            self._changed.notify_all()

    def wait(self, is_met: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_met, LIMIT_S), "the sink waited in vain"

    def wait_ended(self, *sequences: Sequence) -> None:
        self.wait(lambda: all(sequence in self.endings for sequence in sequences))


class PacedRunner(DigestRunner):
    """The digest engine that waits for leave before each step; `waits` is set while it does."""

    def __init__(self) -> None:
        super().__init__()
        self.leave = threading.Semaphore(0)
        self.waits = threading.Event()

    def forward(self, batch: StepBatch) -> Float32Array:
        if not self.leave.acquire(blocking=False):
            self.waits.set()
            assert self.leave.acquire(timeout=30)
            self.waits.clear()
        return super().forward(batch)


def make_sequence(name: str, prompt: list[int], max_tokens: int = 16, **fields: Any) -> Sequence:
    sampling = {
        key: fields.pop(key)
        for key in list(fields)
        if key in SamplingParams.model_fields and key != "max_tokens"
    }
    sampling.setdefault("temperature", 0.0)
    logged = fields.pop("logged", [])
    return Sequence(
        request_id=name,
        attempt=fields.pop("attempt", 1),
        tokens=[*prompt, *logged],
        num_prompt_tokens=len(prompt),
        num_logged=len(logged),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        key_root=fields.pop("key_root", ROOT),
        priority=fields.pop("priority", Priority.NORMAL),
        **fields,
    )


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(32, 126) for _ in range(num_tokens)]


@dataclass
class RunningEngine:
    engine: Engine
    sink: RecordingSink

    def run(self, *sequences: Sequence) -> list[list[int]]:
        for sequence in sequences:
            self.engine.submit(sequence)
        self.sink.wait_ended(*sequences)
        return [self.sink.tokens[sequence] for sequence in sequences]

    def forget_cached(self) -> None:
        assert self.engine.forget_cached().wait(LIMIT_S)

    def wait_at_rest(self) -> None:
        """Nothing runs, and no block is held by anyone."""
        self.wait_stats(
            lambda stats: (
                not any(
                    (stats.waiting, stats.loading, stats.running, stats.storing, stats.used_blocks)
                )
            )
        )

    def wait_stats(self, is_met: Callable[[EngineStats], bool]) -> None:
        limit_s = time.monotonic() + LIMIT_S
        while time.monotonic() < limit_s:
            stats = self.engine.stats()
            assert stats.free_blocks + stats.cached_blocks + stats.used_blocks == stats.total_blocks
            if is_met(stats):
                return
            threading.Event().wait(0.002)
        pytest.fail(f"waited in vain: {self.engine.stats()}")


@dataclass
class Engines:
    """Builds engines and stops them at the end of the test."""

    running: list[RunningEngine] = field(default_factory=list)
    alone: RunningEngine | None = None

    def start(
        self,
        *,
        runner: ModelRunner | None = None,
        mover: KvMover | None = None,
        stop_matcher: StopMatcherFactory = lambda _: None,
        num_blocks: int = 512,
        **settings: Any,
    ) -> RunningEngine:
        sink = RecordingSink()
        engine = Engine(
            runner or DigestRunner(),
            EngineSettings(num_blocks=num_blocks, **settings),
            mover or NoCache(),
            sink,
            stop_matcher,
        )
        engine.start()
        assert engine.ready.wait(LIMIT_S)
        started = RunningEngine(engine, sink)
        self.running.append(started)
        return started

    def reference(self, prompt: list[int], max_tokens: int = 16, **fields: Any) -> list[int]:
        """Output of the request alone on an engine without any cache."""
        if self.alone is None:
            self.alone = self.start(prefix_cache=False, num_blocks=64)
        (tokens,) = self.alone.run(make_sequence("reference", prompt, max_tokens, **fields))
        return tokens


@dataclass
class Kvd:
    """One cache daemon process on a socket of its own."""

    socket_path: Path
    nvme_path: Path
    dram_bytes: int = 4 * 2**20
    block_bytes: int = BLOCK_BYTES
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        env = os.environ | {
            "POINTSMAN_KVD_SOCKET": str(self.socket_path),
            "POINTSMAN_KVD_DRAM_BYTES": str(self.dram_bytes),
            "POINTSMAN_KVD_NVME_BYTES": str(16 * 2**20),
            "POINTSMAN_KVD_NVME_PATH": str(self.nvme_path),
            **self.env,
        }
        self.process = subprocess.Popen([sys.executable, "-m", "tiering.kvd"], env=env)
        limit_s = time.monotonic() + LIMIT_S
        while time.monotonic() < limit_s and self.process.poll() is None:
            try:
                client = self.client("probe")
                client.connect()
            except Exception:  # noqa: BLE001 - any refusal means not yet
                threading.Event().wait(0.02)
            else:
                client.close()
                return
        pytest.fail("kvd did not come up")

    def client(self, holder: str, timeout_s: float = 5.0) -> KvdClient:
        return KvdClient(self.socket_path, self.block_bytes, holder, timeout_s=timeout_s)

    def mover(
        self,
        holder: str = "test",
        max_pending_blocks: int = 256,
        policy: LoadPolicy = LoadPolicy.ALWAYS,
        timeout_s: float = 5.0,
    ) -> KvdMover:
        """The digest engine computes faster than anything loads: by cost it would load nothing."""
        return KvdMover(
            lambda: self.client(holder, timeout_s),
            max_pending_blocks=max_pending_blocks,
            policy=policy,
        )

    def wait_no_leases(self) -> None:
        observer = self.client("observer")
        observer.connect()
        limit_s = time.monotonic() + LIMIT_S
        while observer.stats().num_leases:
            assert time.monotonic() < limit_s, "leases are held for nobody"
        observer.close()

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(LIMIT_S)
            self.process = None


@pytest.fixture(name="sequence")
def sequence_factory() -> Callable[..., Sequence]:
    return make_sequence


@pytest.fixture
def prompts() -> Callable[[random.Random, int], list[int]]:
    return random_prompt


@pytest.fixture
def paced_runner() -> PacedRunner:
    return PacedRunner()


@pytest.fixture
def engines() -> Iterator[Engines]:
    built = Engines()
    yield built
    for started in built.running:
        started.engine.stop(0)


@pytest.fixture
def kvd(tmp_path: Path) -> Iterator[Kvd]:
    daemon = Kvd(tmp_path / "kvd.sock", tmp_path / "nvme.slab")
    daemon.start()
    yield daemon
    daemon.end()
