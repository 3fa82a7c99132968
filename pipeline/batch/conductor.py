"""Runs all batches, in exactly one of the gateway processes at a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import redis.asyncio
import structlog

from pipeline.batch.batch_store import BatchStore
from pipeline.batch.drive import Drive, DriveParts
from pipeline.batch.feeder import FeederParts
from pipeline.batch.file_store import FileStore
from pipeline.batch.lease import RunnerLease
from pipeline.batch.line_run import LineRunner
from pipeline.batch.line_store import LineStore
from pipeline.batch.records import BatchRecord
from pipeline.batch.refusals import DatabaseAway
from pipeline.batch.result_files import ResultFiles
from pipeline.batch.result_writer import ResultWriter
from pipeline.batch.slots import SlotBook, wanted_window
from pipeline.batch.validation import Validator
from pipeline.cancellation import end_tasks
from pipeline.client import PipelineClient
from pipeline.errors import StoreUnavailable
from pipeline.intake.build import Caller
from pipeline.intake.model_catalog import ModelCatalog

log = structlog.get_logger(__name__)

TICK_S = 0.5
CLEANING_S = 60.0
MAX_ACTIVE = 8  # batches of a model at once
MAX_DRIVES = 64
_LOOK_AT = 1_024  # batches, fairly picked, from which the active ones are chosen
_STORE_THREADS = 4


@dataclass(frozen=True, slots=True)
class BatchStores:
    """Everything about files and batches that is kept."""

    files: FileStore
    batches: BatchStore
    lines: LineStore


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What lines are run with.

    `caller_of` gives a tenant's terms; `max_window` bounds what is queued for a model, in requests.
    """

    client: PipelineClient
    models: ModelCatalog
    caller_of: Callable[[str], Caller]
    max_window: int


class BatchConductor:
    """One per gateway process; idle where another process holds the lease."""

    def __init__(
        self, stores: BatchStores, pipeline: Pipeline, lease_client: redis.asyncio.Redis
    ) -> None:
        self._stores = stores
        self._pipeline = pipeline
        self._redis = lease_client
        self._lease = RunnerLease(lease_client)
        self._slots = SlotBook()
        self._building = ThreadPoolExecutor(1, thread_name_prefix="batch-build")
        self._validating = ThreadPoolExecutor(1, thread_name_prefix="batch-validate")
        self._storing = ThreadPoolExecutor(_STORE_THREADS, thread_name_prefix="batch-store")
        self._runner = LineRunner(
            pipeline.client, pipeline.models, self._building, pipeline.caller_of
        )
        self._writer = ResultWriter(stores.lines, self._storing)
        self._parts = self._make_parts()
        self._drives: dict[int, tuple[Drive, asyncio.Task[None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._rung = asyncio.Event()
        self._cleaned_s = float("-inf")

    async def start(self) -> None:
        """Begin to ask for the lease; returns at once, also when Redis is away."""
        self._tasks = [
            asyncio.create_task(self._lead_for_ever(), name="batches"),
            asyncio.create_task(self._writer.run(), name="batch-results"),
        ]

    async def close(self) -> None:
        """Stop; requests go on, and the next holder of the lease follows them."""
        await end_tasks(*self._tasks[:1])
        await self._let_go()
        await end_tasks(*self._tasks)
        await self._redis.aclose()
        for executor in (self._building, self._validating, self._storing):
            executor.shutdown(wait=False, cancel_futures=True)

    def wake(self) -> None:
        """A batch came or is to be cancelled: look at once."""
        self._rung.set()

    @property
    def num_in_flight(self) -> int:
        """Lines that this process has in the pipeline."""
        return self._slots.num_taken

    def _make_parts(self) -> DriveParts:
        stores = self._stores
        storage = stores.files.storage
        feeding = FeederParts(
            stores.lines, storage, self._runner, self._writer, self._slots, self._storing
        )
        return DriveParts(
            batches=stores.batches,
            validator=Validator(stores.lines, storage),
            files=ResultFiles(stores.lines, storage),
            feeding=feeding,
            storing=self._storing,
            validating=self._validating,
        )

    async def _lead_for_ever(self) -> None:
        while True:
            try:
                if await self._lease.hold():
                    await self._oversee()
                elif self._drives:
                    await self._end_drives()
            except (DatabaseAway, StoreUnavailable) as error:
                log.warning("batches_wait", cause=type(error).__name__)
            except Exception:
                log.exception("batches_failed")
            self._rung.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._rung.wait()

    async def _oversee(self) -> None:
        """Start what shall run, tell each drive how its batch stands, set the window."""
        loop = asyncio.get_running_loop()
        self._drives = {
            number: (drive, task)
            for number, (drive, task) in self._drives.items()
            if not task.done()
        }
        batches = await loop.run_in_executor(
            self._storing, self._stores.batches.unfinished, _LOOK_AT, list(self._drives)
        )
        for batch in batches:
            if batch.number in self._drives:
                self._drives[batch.number][0].see(batch, time.time())
        for batch in chosen(batches, set(self._drives)):
            drive = Drive(self._parts, batch)
            task = asyncio.create_task(drive.run(), name=f"drive-{batch.number}")
            task.add_done_callback(lambda _: self._rung.set())
            self._drives[batch.number] = (drive, task)
        await self._set_window()
        if loop.time() - self._cleaned_s > CLEANING_S:
            self._cleaned_s = loop.time()
            await loop.run_in_executor(self._storing, self._clean)

    async def _set_window(self) -> None:
        fleet = await self._pipeline.client.fleet()
        max_window = self._pipeline.max_window
        for slug in {*self._slots.slugs, *fleet.models}:
            num_running = self._runner.num_running[slug]
            window = wanted_window(fleet.of_model(slug), num_running, max_window)
            self._slots.of(slug).set_limit(window)

    def _clean(self) -> None:
        self._stores.files.purge_expired(int(time.time()))
        self._stores.lines.purge_ended()

    async def _end_drives(self) -> None:
        drives, self._drives = self._drives, {}
        await end_tasks(*(task for _, task in drives.values()))

    async def _let_go(self) -> None:
        await self._end_drives()
        await self._lease.release()


def chosen(batches: Sequence[BatchRecord], active: set[int]) -> list[BatchRecord]:
    """Which batches to start: the oldest of each tenant in turn, `MAX_ACTIVE` of a model at most.

    Those that are being validated, whose model is not known yet, count as those of one model.
    """
    rounds: Counter[tuple[str | None, str]] = Counter()
    places = Counter(batch.model for batch in batches if batch.number in active)
    ranked: list[tuple[int, int, BatchRecord]] = []
    for batch in batches:  # oldest first
        if batch.number not in active:
            ranked.append((rounds[batch.model, batch.tenant], batch.number, batch))
        rounds[batch.model, batch.tenant] += 1
    found: list[BatchRecord] = []
    for _, _, batch in sorted(ranked, key=lambda item: item[:2]):
        if places[batch.model] < MAX_ACTIVE and len(active) + len(found) < MAX_DRIVES:
            places[batch.model] += 1
            found.append(batch)
    return found
