"""Keeps the lines of one batch flowing: a window of them in flight, never more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from pipeline.batch.file_storage import FileStorage
from pipeline.batch.line_run import LineRunner, LineStopped, crashed_result, line_request_id
from pipeline.batch.line_source import LineSource, LineText
from pipeline.batch.line_store import LineStore
from pipeline.batch.records import BatchRecord
from pipeline.batch.result_writer import ResultWriter
from pipeline.batch.slots import SlotBook, Slots
from pipeline.cancellation import end_tasks
from pipeline.errors import StoreUnavailable

log = structlog.get_logger(__name__)

CANCEL_AGAIN_S = 0.5
_FORGET_GROUP = 64


@dataclass(frozen=True, slots=True)
class FeederParts:
    """What feeders share: one of each per process."""

    lines: LineStore
    storage: FileStorage
    runner: LineRunner
    writer: ResultWriter
    slots: SlotBook
    storing: Executor


class Feeder:
    """Feeds one batch."""

    def __init__(self, parts: FeederParts, batch: BatchRecord) -> None:
        self._parts = parts
        self._batch = batch
        self._tasks: set[asyncio.Task[None]] = set()
        self._answered: list[str] = []

    async def run(self, stop: asyncio.Event) -> bool:
        """Run every line that has no result; True when all have one.

        False when `stop` was set: requests in flight have been cancelled then, and those that ended
        normally all the same have their results. Cancelled itself, it leaves the requests running.

        Raises:
            OSError, DatabaseAway: the input cannot be read; another run goes on from here.
        """
        stopping = asyncio.create_task(stop.wait())
        try:
            async with aclosing(self._lines()) as lines:
                async for line in lines:
                    slots = self._parts.slots.of(self._parts.runner.slug_of(line))
                    if not await self._has_slot(slots, stopping):
                        break
                    self._start(line, slots, stop)
            while self._tasks and not stopping.done():
                await asyncio.wait({*self._tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                await self._stop_all()
        finally:
            await end_tasks(stopping, *self._tasks)
        await self._forget()
        return not stop.is_set()

    async def _lines(self) -> AsyncGenerator[LineText, None]:
        loop = asyncio.get_running_loop()
        parts = self._parts
        source = await loop.run_in_executor(
            parts.storing, LineSource, parts.lines, parts.storage, self._batch
        )
        try:
            while window := await loop.run_in_executor(parts.storing, source.next_window):
                for line in window:
                    yield line
        finally:
            source.close()

    async def _has_slot(self, slots: Slots, stopping: asyncio.Task[bool]) -> bool:
        """Wait for a slot; True when it is ours, False when the batch shall stop."""
        turn = slots.ask()
        is_ours = False
        try:
            if not turn.done():
                ends: set[asyncio.Future[Any]] = {turn, stopping}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            is_ours = turn.done() and not stopping.done()
        finally:
            if not is_ours:
                slots.withdraw(turn)
        return is_ours

    def _start(self, line: LineText, slots: Slots, stop: asyncio.Event) -> None:
        task = asyncio.create_task(self._run_line(line, stop))
        self._tasks.add(task)
        task.add_done_callback(partial(self._note_end, slots))

    def _note_end(self, slots: Slots, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        slots.give_back()  # here, because a task may be cancelled before it begins

    async def _run_line(self, line: LineText, stop: asyncio.Event) -> None:
        try:
            result = await self._parts.runner.run(self._batch, line, stop)
        except LineStopped:
            return
        except Exception:
            # One line that trips a fault of ours must not hold up the others for ever.
            log.exception("batch_line_crashed", batch=self._batch.id, line=line.place.line)
            result = crashed_result(self._batch, line)
        await self._parts.writer.add(result)
        self._answered.append(line_request_id(self._batch, line.place.line))
        if len(self._answered) >= _FORGET_GROUP:
            await self._forget()

    async def _stop_all(self) -> None:
        """Cancel what is in flight, again and again: some may be submitted just now."""
        while self._tasks:
            await self._parts.runner.cancel(self._batch)
            await asyncio.wait(self._tasks, timeout=CANCEL_AGAIN_S)

    async def _forget(self) -> None:
        """Redis need not remember what stands in the database."""
        answered, self._answered = self._answered, []
        try:
            await self._parts.runner.client.forget(answered)
        except StoreUnavailable:
            return  # their retention ends by itself
