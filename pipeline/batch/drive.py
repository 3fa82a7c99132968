"""Takes one batch from its status now to its end, from wherever an earlier process left it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog

from pipeline.batch.batch_store import BatchEnd, BatchStore
from pipeline.batch.feeder import Feeder, FeederParts
from pipeline.batch.line_run import line_request_id
from pipeline.batch.records import BatchRecord, BatchStatus
from pipeline.batch.refusals import DatabaseAway
from pipeline.batch.result_files import ResultFiles
from pipeline.batch.validation import Validator
from pipeline.errors import StoreUnavailable

log = structlog.get_logger(__name__)

RETRY_S = 2.0
_CANCEL_GROUP = 64
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class DriveParts:
    """What drives share. `validating` is where the long reads of input files run, one at a time."""

    batches: BatchStore
    validator: Validator
    files: ResultFiles
    feeding: FeederParts
    storing: Executor
    validating: Executor


class Drive:
    """One batch's way to its end."""

    def __init__(self, parts: DriveParts, batch: BatchRecord) -> None:
        self._parts = parts
        self._batch = batch
        self._stop = asyncio.Event()
        # Another process may have lines in flight that we have not followed yet.
        self._is_heir = batch.status is not BatchStatus.VALIDATING

    def see(self, batch: BatchRecord, now_s: float) -> None:
        """Hear how the batch stands; a cancelled or expired one is stopped."""
        if batch.status is BatchStatus.CANCELLING or now_s >= batch.expires_s:
            self._stop.set()

    async def run(self) -> None:
        """Work until the batch is over, or accepted; what is away is waited for.

        An accepted one is taken up anew, for its model is known by then: each has places of its own.
        """
        try:
            with structlog.contextvars.bound_contextvars(batch=self._batch.id):
                while not await self._try_step():
                    pass
        finally:
            self._stop.set()  # ends the validation thread

    async def _try_step(self) -> bool:
        try:
            return await self._step()
        except (DatabaseAway, StoreUnavailable, OSError) as error:
            log.warning("batch_waits", cause=type(error).__name__)
        except Exception:
            log.exception("batch_step_failed")
        await asyncio.sleep(RETRY_S)
        return False

    async def _step(self) -> bool:
        """From one status to the next; True when this drive is over."""
        batch = await self._store(self._parts.batches.load, self._batch.number)
        self._batch = batch
        self.see(batch, time.time())
        match batch.status:
            case BatchStatus.VALIDATING:
                return await self._validate()
            case BatchStatus.IN_PROGRESS:
                await self._feed()
            case BatchStatus.FINALIZING:
                await self._finish(BatchStatus.COMPLETED)
            case BatchStatus.CANCELLING:
                if (
                    batch.times["in_progress"] is None
                ):  # what validation has entered counts as nothing
                    clear = self._parts.feeding.lines.clear
                    await self._store(clear, batch.number, (BatchStatus.CANCELLING,))
                await self._cancel_leftovers()
                await self._finish(BatchStatus.CANCELLED)
            case _:
                log.info("batch_ended", status=str(batch.status), num_lines=batch.num_lines)
                await self._store(self._parts.feeding.lines.purge_ended)
                return True
        return False

    async def _validate(self) -> bool:
        """True if the batch was accepted."""
        batch, parts = self._batch, self._parts
        began_s = time.monotonic()
        run = partial(parts.validator.run, batch, lambda: not self._stop.is_set())
        verdict = await asyncio.get_running_loop().run_in_executor(parts.validating, run)
        if verdict is None:
            if time.time() >= batch.expires_s:
                end = BatchEnd(BatchStatus.EXPIRED, num_completed=0, num_failed=0)
                await self._store(partial(parts.batches.finish, batch, end, _now_s()))
        elif verdict.errors:
            fail = partial(parts.batches.fail, batch.number, verdict.errors, _now_s())
            await self._store(fail)
        else:
            accept = partial(
                parts.batches.accept, batch.number, verdict.num_lines, verdict.model, _now_s()
            )
            await self._store(accept)
            took_s = round(time.monotonic() - began_s, 3)
            log.info("batch_accepted", num_lines=verdict.num_lines, validation_s=took_s)
            return True
        return False

    async def _feed(self) -> None:
        batch = self._batch
        if await Feeder(self._parts.feeding, batch).run(self._stop):
            begin = partial(self._parts.batches.begin_finalizing, batch.number, _now_s())
            await self._store(begin)
        elif time.time() >= batch.expires_s:
            await self._cancel_leftovers()
            await self._finish(BatchStatus.EXPIRED)

    async def _finish(self, status: BatchStatus) -> None:
        parts, batch = self._parts, self._batch
        end = await self._store(partial(parts.files.write, batch, status, _now_s()))
        if not await self._store(partial(parts.batches.finish, batch, end, _now_s())):
            await self._store(partial(parts.files.discard, end))

    async def _cancel_leftovers(self) -> None:
        """Stop what an earlier process may have in flight. Our own feeder has ended what it began."""
        if not self._is_heir:
            return
        last_line = 0
        while True:
            pending = partial(
                self._parts.feeding.lines.pending,
                self._batch.number,
                after_line=last_line,
                limit=_CANCEL_GROUP,
            )
            places = await self._store(pending)
            if not places:
                return
            cancel = self._parts.feeding.runner.client.cancel
            ids = [line_request_id(self._batch, place.line) for place in places]
            await asyncio.gather(*(cancel(request_id) for request_id in ids))
            last_line = places[-1].line

    async def _store(self, call: Callable[..., _Result], *args: object) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._parts.storing, call, *args)


def _now_s() -> int:
    return int(time.time())
