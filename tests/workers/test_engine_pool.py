"""The Celery pool takes what the engine has places and blocks for, and leaves the rest to other workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import pytest

from pipeline.ledger.store import connect
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.protocol.sampling import SamplingParams
from tests.flow.rig import wait_until
from tests.workers.conftest import RecordingSink
from workers.engine_pool import EnginePool, SafeQoS
from workers.kv_mover import NoCache
from workers.models.digest import DigestRunner
from workers.request_desk import RequestDesk
from workers.sequence import Sequence
from workers.settings import EngineSettings
from workers.step_loop import Engine

PROMPT_BLOCKS = 3
SETTINGS = EngineSettings(
    num_blocks=2 * (PROMPT_BLOCKS + 2), max_batch_sequences=8, max_waiting=2, prefix_cache=False
)


@dataclass
class Shop:
    """A pool whose engine has blocks for two sequences and places for eight."""

    engine: Engine
    pool: EnginePool
    numbers: Iterator[int]

    def submit(self) -> Sequence:
        number = next(self.numbers)
        prompt = [number] * (PROMPT_BLOCKS * SETTINGS.block_tokens)
        sampling = SamplingParams(max_tokens=16, ignore_eos=True)
        sequence = Sequence(f"r{number}", 1, prompt, len(prompt), sampling, bytes(32))
        self.engine.submit(sequence)
        return sequence


@pytest.fixture
def shop(redis_url: str) -> Iterator[Shop]:
    client = connect(redis_url)
    ledger = WorkerLedger(client, max_attempts=3, retention_s=60)
    desk = RequestDesk("w1", ("decode.m.a",), False, ledger, lambda *_: bytes(32), lambda _: None)
    runner = DigestRunner(step_delay_ms=1000.0)  # nobody ends while the test looks
    desk.engine = Engine(runner, SETTINGS, NoCache(), RecordingSink(), lambda _: None)
    desk.engine.start()
    assert desk.engine.ready.wait(10)
    kept = SafeQoS.has_place
    pool = EnginePool.bound_to(desk, lambda: None, SETTINGS)()
    try:
        yield Shop(desk.engine, pool, count(1))
    finally:
        SafeQoS.has_place = staticmethod(kept)
        desk.engine.stop(0)
        client.close()


def test_messages_are_taken_until_sequences_wait_for_blocks_and_again_when_they_do_not(
    shop: Shop,
) -> None:
    assert SafeQoS.has_place()
    sequences = [shop.submit() for _ in range(4)]
    wait_until(lambda: shop.engine.stats().waiting == 2, what="two run, two wait")
    assert not SafeQoS.has_place(), "six places are free, but no blocks"

    shop.engine.cancel(sequences[-1].request_id)
    wait_until(SafeQoS.has_place, what="one waits, and one more may")
