"""Requests in the ledger whose blocks are on NVMe, while the engine has no place for them."""

# ruff: noqa: S311 - random prompts, no secrets

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from pipeline.ledger.admission import AdmissionLimits
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.store import connect, connect_async
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.protocol.request import Request
from pipeline.protocol.sampling import SamplingParams
from tiering.block_hash import BlockHasher, namespace_root
from workers.look_ahead import LookAhead
from workers.models.digest import DigestRunner
from workers.sequence import Sequence
from workers.settings import EngineSettings

ROOT = namespace_root({"test": "engine"})
QUEUE = "prefill"
NUM_PROMPTS, PROMPT_TOKENS, PROMPT_BLOCKS = 6, 100, 6
MakeSequence = Callable[..., Sequence]
MakePrompt = Callable[[random.Random, int], list[int]]


@pytest.fixture
async def gateway(redis_url: str) -> AsyncIterator[ClientLedger]:
    connection = connect_async(redis_url)
    yield ClientLedger(connection, limits=AdmissionLimits(100), retention_s=60)
    await connection.aclose()


@pytest.fixture
def ledger(redis_url: str) -> WorkerLedger:
    ledger = WorkerLedger(connect(redis_url), max_attempts=2, retention_s=60)
    ledger.beat("w", 60.0, json.dumps({"queues": [QUEUE], "capacity": 1, "role": "both"}))
    return ledger


class OnDisk:
    """Prompts whose blocks lie on the node's disk alone, and where they lie now."""

    def __init__(self, prompts: list[list[int]], client: Any) -> None:
        self.prompts = prompts
        self._client = client
        self._keys = [BlockHasher(ROOT).keys(prompt, 16) for prompt in prompts]

    def in_dram(self) -> list[int]:
        """How many blocks of each prompt's head run DRAM has."""
        found = [self._client.locate(keys) for keys in self._keys]
        assert [num_all for _, num_all in found] == [PROMPT_BLOCKS] * NUM_PROMPTS
        return [num_dram for num_dram, _ in found]

    def wait_in_dram(self, *counts: int) -> None:
        limit_s = time.monotonic() + 30
        while self.in_dram() != list(counts):
            assert time.monotonic() < limit_s, f"{self.in_dram()} instead of {counts}"
            threading.Event().wait(0.01)


@pytest.fixture
def on_disk(engines: Any, kvd: Any, sequence: MakeSequence, prompts: MakePrompt) -> Any:
    rng = random.Random(1)
    asked = [prompts(rng, PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
    first = engines.start(mover=kvd.mover("first"))
    for number, prompt in enumerate(asked):
        first.run(sequence(f"w{number}", list(prompt)))
    first.engine.stop(5)
    kvd.end()
    kvd.start()
    client = kvd.client("observer")
    client.connect()
    disk = OnDisk(asked, client)
    assert not any(disk.in_dram())
    yield disk
    client.close()


def start(engines: Any, kvd: Any, ledger: WorkerLedger, num_blocks: int) -> tuple[Any, LookAhead]:
    """An engine with one place, and what looks ahead for it as if it had `num_blocks`."""
    engine = engines.start(
        runner=DigestRunner(step_delay_ms=20), mover=kvd.mover(), max_batch_sequences=1
    )
    settings = EngineSettings(num_blocks=num_blocks, max_batch_sequences=1)
    return engine, LookAhead((QUEUE,), ledger, engine.engine, settings, lambda *_: ROOT)


async def submit(gateway: ClientLedger, name: str, prompt: list[int], **sampling: Any) -> None:
    options = SamplingParams(max_tokens=4, **sampling)
    await gateway.submit(Request(name, "m", prompt, options, tenant="t"), QUEUE, "gateway:g")


async def test_what_waits_in_the_ledger_is_fetched_while_no_place_is_free(
    engines: Any,
    kvd: Any,
    sequence: MakeSequence,
    on_disk: OnDisk,
    gateway: ClientLedger,
    ledger: WorkerLedger,
) -> None:
    engine, look_ahead = start(engines, kvd, ledger, 512)
    await submit(gateway, "private", on_disk.prompts[5], uses_cache=False)
    for number in range(5):
        await submit(gateway, f"r{number}", on_disk.prompts[number])
    look_ahead.look()
    assert not any(on_disk.in_dram()), "the engine has a place"

    running = sequence("running", [65] * 20, 400)
    engine.engine.submit(running)
    engine.wait_stats(lambda stats: stats.running == 1)
    await gateway.cancel("r2")
    for _ in range(2):
        look_ahead.look()
    on_disk.wait_in_dram(6, 6, 0, 6, 0, 0)  # with the private one these are the first four
    assert running not in engine.sink.endings, "the others still waited"
    engine.wait_stats(lambda stats: stats.mover.num_prefetched_blocks == 3 * PROMPT_BLOCKS)


async def test_no_more_is_fetched_ahead_than_half_of_the_pool_holds(
    engines: Any,
    kvd: Any,
    sequence: MakeSequence,
    on_disk: OnDisk,
    gateway: ClientLedger,
    ledger: WorkerLedger,
) -> None:
    engine, look_ahead = start(engines, kvd, ledger, 2 * (PROMPT_BLOCKS + 2))
    for number in range(2):
        await submit(gateway, f"r{number}", on_disk.prompts[number])
    engine.engine.submit(sequence("running", [65] * 20, 400))
    engine.wait_stats(lambda stats: stats.running == 1)
    for _ in range(2):
        look_ahead.look()
    on_disk.wait_in_dram(PROMPT_BLOCKS, 2, 0, 0, 0, 0)
    engine.wait_stats(lambda stats: stats.mover.num_prefetched_blocks == PROMPT_BLOCKS + 2)


async def test_a_look_that_fails_is_told_and_is_not_the_last(
    engines: Any,
    kvd: Any,
    sequence: MakeSequence,
    on_disk: OnDisk,
    gateway: ClientLedger,
    ledger: WorkerLedger,
) -> None:
    engine, look_ahead = start(engines, kvd, ledger, 512)
    roots = iter([lambda: {}["no such tenant"], lambda: ROOT])
    look_ahead.key_root_for = lambda *_: next(roots)()
    await submit(gateway, "r0", on_disk.prompts[0])
    engine.engine.submit(sequence("running", [65] * 20, 400))
    engine.wait_stats(lambda stats: stats.running == 1)
    with capture_logs() as told:
        look_ahead.start()
        on_disk.wait_in_dram(PROMPT_BLOCKS, 0, 0, 0, 0, 0)
        look_ahead.close()
    assert [event["event"] for event in told].count("look_ahead_failed") == 1
