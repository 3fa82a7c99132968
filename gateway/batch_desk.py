"""Files and batches of one gateway process: the stores, a thread pool for them, and the runner."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import structlog

from pipeline.batch.batch_store import BatchStore
from pipeline.batch.conductor import BatchConductor, BatchStores, Pipeline
from pipeline.batch.database import Database
from pipeline.batch.file_storage import FileStorage
from pipeline.batch.file_store import FileStore
from pipeline.batch.line_store import LineStore
from pipeline.batch.refusals import DatabaseAway
from pipeline.cancellation import end_tasks
from pipeline.client import PipelineClient
from pipeline.intake.build import Caller
from pipeline.intake.model_catalog import ModelCatalog
from pipeline.ledger.store import connect_async
from pipeline.protocol.tenant import tenant_salt
from pipeline.settings import PipelineSettings

log = structlog.get_logger(__name__)

_STORE_THREADS = 4
_LEASE_CONNECTIONS = 2
_OPEN_WAIT_S, _OPEN_AGAIN_S = 5.0, 2.0
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class BatchDesk:
    """What the routes of files and batches work with."""

    def __init__(
        self, settings: PipelineSettings, client: PipelineClient, models: ModelCatalog
    ) -> None:
        folder = settings.data_dir.expanduser().absolute()
        url = settings.database_url or f"sqlite:///{folder / 'batches' / 'batches.sqlite'}"
        self._database = Database(url)
        storage = FileStorage(settings.files_url or (folder / "batches" / "files").as_uri())
        self.files = FileStore(self._database, storage)
        self.batches = BatchStore(self._database, deadline_s=settings.batch_deadline_s)
        self._storing = ThreadPoolExecutor(_STORE_THREADS, thread_name_prefix="files")
        self._conductor = BatchConductor(
            BatchStores(self.files, self.batches, LineStore(self._database)),
            # Half of a queue's places stay free for those who wait in person.
            Pipeline(client, models, _caller, max(1, settings.max_waiting // 2)),
            connect_async(settings.redis_url, max_connections=_LEASE_CONNECTIONS),
        )
        self._is_open = False
        self._opener: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bring the database up to date and take part in running batches.

        Returns also when the database is away: interactive requests do not need it. It is asked again
        until it answers; meanwhile `store` raises.
        """
        tried = asyncio.Event()
        self._opener = asyncio.create_task(self._open(tried), name="database")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(tried.wait(), _OPEN_WAIT_S)
        if self._opener.done():
            self._opener.result()

    async def close(self) -> None:
        """Stop all that `start` began. Requests go on; another process follows them."""
        if self._opener is not None:
            await end_tasks(self._opener)
        await self._conductor.close()
        self._storing.shutdown(wait=True)
        self._database.close()

    @property
    def num_lines_in_flight(self) -> int:
        """Lines of batches that this process has in the pipeline."""
        return self._conductor.num_in_flight

    def wake(self) -> None:
        """A batch has come or changed: the runner, if it is ours, looks at once."""
        self._conductor.wake()

    async def store(
        self, call: Callable[_Args, _Result], *args: _Args.args, **kwargs: _Args.kwargs
    ) -> _Result:
        """Run a call of the stores in a thread.

        Raises:
            DatabaseAway: it has not been opened yet, or does not answer.
        """
        if not self._is_open:
            raise DatabaseAway
        return await self._in_thread(partial(call, *args, **kwargs))

    async def _open(self, tried: asyncio.Event) -> None:
        try:
            is_open = await self._opened()
        finally:
            tried.set()
        while not is_open:
            await asyncio.sleep(_OPEN_AGAIN_S)
            try:
                is_open = await self._opened()
            except Exception:
                # The task's edge: another process may mend what this one cannot.
                log.exception("database_not_opened")

    async def _opened(self) -> bool:
        try:
            await self._in_thread(self._database.migrate)
        except DatabaseAway:
            return False
        self._is_open = True
        await self._conductor.start()
        log.info("database_opened")
        return True

    async def _in_thread(self, call: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._storing, call)


def now_s() -> int:
    """Unix time."""
    return int(time.time())


def _caller(tenant: str) -> Caller:
    return Caller(tenant, tenant_salt(tenant))
