"""Answers that watch their client: whole ones and event streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import structlog
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.drain import Drain
from gateway.http_errors import Crashed, Draining
from gateway.sse import EventWriter
from pipeline.cancellation import end_tasks

log = structlog.get_logger(__name__)
_Result = TypeVar("_Result")
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientGone(Exception):
    """The client closed its connection; nobody will read an answer."""


async def run_while_connected(
    work: Coroutine[Any, Any, _Result],
    receive: Receive | None,
    drain: Drain,
    on_cut: Callable[[], Awaitable[None]],
) -> _Result:
    """The result of `work`, which is cancelled when the client leaves or the drain time is over.

    `on_cut` is awaited whenever there is no result. Without `receive` the client is not watched.

    Raises:
        ClientGone: the client left.
        Draining: the process must end.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_until_gone(receive))
    deadline = asyncio.create_task(drain.deadline.wait())
    is_cut = True
    try:
        with drain.active():
            await asyncio.wait({task, gone, deadline}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone if gone.done() else Draining
            result = await task
            is_cut = False
            return result
    finally:
        if is_cut:
            await asyncio.shield(on_cut())
        await end_tasks(task, gone, deadline)


class EventStreamAnswer(Response):
    """A stream of events, sent as they come.

    When the client leaves, stops reading, or the drain time is over, or the stream fails, `on_cut` is
    awaited, which must not raise; in the last two cases the client is told by an error event first.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        writer: EventWriter,
        on_cut: Callable[[], Awaitable[None]],
        drain: Drain,
        write_timeout_s: float,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._writer = writer
        self._on_cut = on_cut
        self._drain = drain
        self._write_timeout_s = write_timeout_s
        self._is_cut = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        writing = asyncio.create_task(self._write(send))
        gone = asyncio.create_task(_wait_until_gone(receive))
        deadline = asyncio.create_task(self._drain.deadline.wait())
        try:
            with self._drain.active():
                await asyncio.wait({writing, gone, deadline}, return_when=asyncio.FIRST_COMPLETED)
                if writing.done():
                    await self._close(writing, send)
                    return
                self._is_cut = True
                await asyncio.shield(self._on_cut())
                await end_tasks(writing)
                if not gone.done():
                    await self._send(send, self._writer.fail(Draining()), more_body=False)
        finally:
            await end_tasks(writing, gone, deadline)
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async with aclosing(self._events):
            async for data in self._events:
                if self._is_cut:
                    return
                await self._send(send, data, more_body=True)
        if not self._is_cut:
            await self._send(send, b"", more_body=False)

    async def _close(self, writing: asyncio.Task[None], send: Send) -> None:
        """Look at how writing ended; an unknown failure is told to the client."""
        try:
            await writing
        except (TimeoutError, OSError) as error:
            log.info("stream_given_up", cause=type(error).__name__)
        except Exception:
            log.exception("stream_crashed")
            await self._send(send, self._writer.fail(Crashed()), more_body=False)
        if self._writer.has_failed or not self._writer.is_complete:
            await self._on_cut()

    async def _send(self, send: Send, data: bytes, *, more_body: bool) -> None:
        async with asyncio.timeout(self._write_timeout_s):
            await send({"type": "http.response.body", "body": data, "more_body": more_body})


async def _wait_until_gone(receive: Receive | None) -> None:
    while receive is None:
        await asyncio.Event().wait()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
