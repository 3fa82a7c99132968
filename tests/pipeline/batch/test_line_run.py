"""A line is refused for what is its own fault; what will be there later it waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import orjson
import pytest

from pipeline.batch.drive import Drive, DriveParts
from pipeline.batch.feeder import FeederParts
from pipeline.batch.line_run import LineRunner, LineStopped
from pipeline.batch.line_source import LineText
from pipeline.batch.line_store import LinePlace
from pipeline.batch.records import BatchRecord, BatchStatus
from pipeline.batch.result_files import ResultFiles
from pipeline.batch.result_writer import ResultWriter
from pipeline.batch.slots import SlotBook
from pipeline.batch.validation import Validator
from pipeline.client import PipelineClient
from pipeline.intake.build import Caller, Intake
from pipeline.intake.errors import ModelFilesUnusable
from pipeline.intake.known_models import KnownModel
from pipeline.intake.model_catalog import ModelCatalog
from pipeline.ledger.keys import WORKERS
from pipeline.ledger.store import connect
from pipeline.scheduling.fleet import Role, WorkerState
from pipeline.settings import PipelineSettings

WAIT_S = 0.5
LIMIT_S = 10.0
DATA = b'{"body": {"model": "m", "prompt": "hello"}}'


@pytest.fixture
async def client(redis_url: str, tmp_path: Path) -> AsyncIterator[PipelineClient]:
    pipeline = PipelineClient(PipelineSettings(redis_url=redis_url, data_dir=tmp_path))
    yield pipeline
    await pipeline.close()


@pytest.fixture
def batch(shelf: Any, make_input_line: Callable[..., bytes]) -> BatchRecord:
    record: BatchRecord = shelf.accepted(make_input_line("a", model="m", prompt="hello") + b"\n")
    return record


@pytest.fixture
def other_worker(redis_url: str) -> None:
    """One of another model lives."""
    state = WorkerState(
        worker="w", node="n", role=Role.BOTH, model="other", namespace="", queues=(), capacity=1
    )
    store: Any = connect(redis_url)
    now_ms = int(store.time()[0]) * 1000
    store.hset(WORKERS, "w", msgpack.packb([now_ms, state.model_dump_json().encode()]))
    store.close()


def no_files(known: KnownModel) -> Intake:
    raise ModelFilesUnusable(Path(known.name), "the disk is away")


async def is_answered(
    client: PipelineClient, batch: BatchRecord, configured: Iterable[KnownModel] = ()
) -> bool:
    """Whether the line has a result at once; False if it waits until the batch is stopped."""
    line = LineText(LinePlace(1, "a", 0, len(DATA)), DATA, "m")
    models = ModelCatalog(configured, client, no_files)
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(WAIT_S, stop.set)
    with ThreadPoolExecutor(1) as building:
        runner = LineRunner(client, models, building, lambda _tenant: Caller())
        try:
            result = await runner.run(batch, line, stop)
        except LineStopped:
            return False
        finally:
            models.close()
    assert orjson.loads(result.output)["response"]["status_code"] == 404
    return True


async def test_a_line_waits_while_no_worker_of_any_model_lives(
    client: PipelineClient, batch: BatchRecord
) -> None:
    assert not await is_answered(client, batch)


@pytest.mark.usefixtures("other_worker")
async def test_a_model_that_nobody_knows_is_the_fault_of_the_line(
    client: PipelineClient, batch: BatchRecord
) -> None:
    assert await is_answered(client, batch)


@pytest.mark.usefixtures("other_worker")
async def test_a_model_that_has_answered_the_batch_before_is_waited_for(
    client: PipelineClient, batch: BatchRecord
) -> None:
    assert not await is_answered(client, replace(batch, num_completed=1))


async def test_a_line_waits_for_files_that_cannot_be_loaded_now(
    client: PipelineClient, batch: BatchRecord
) -> None:
    assert not await is_answered(client, batch, [KnownModel("m", "digest")])


async def test_a_batch_that_is_accepted_is_chosen_anew_under_its_model(
    shelf: Any, make_input_line: Callable[..., bytes], client: PipelineClient
) -> None:
    """Else those that came while nothing ran would fill all places under no model's name."""
    batch = shelf.order(make_input_line("a", model="m", prompt="hello") + b"\n")
    models = ModelCatalog((), client, no_files)
    with ThreadPoolExecutor(1) as threads:
        writer = ResultWriter(shelf.lines, threads)
        runner = LineRunner(client, models, threads, lambda _tenant: Caller())
        feeding = FeederParts(shelf.lines, shelf.storage, runner, writer, SlotBook(), threads)
        parts = DriveParts(
            batches=shelf.batches,
            validator=Validator(shelf.lines, shelf.storage),
            files=ResultFiles(shelf.lines, shelf.storage),
            feeding=feeding,
            storing=threads,
            validating=threads,
        )
        async with asyncio.timeout(LIMIT_S):
            await Drive(parts, replace(batch, expires_s=int(time.time()) + 60)).run()
    models.close()
    accepted = shelf.batches.load(batch.number)
    assert (accepted.status, accepted.model) == (BatchStatus.IN_PROGRESS, "m")
