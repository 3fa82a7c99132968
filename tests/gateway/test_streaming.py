"""Cases C067 and C078 on one answer: what happens when the client leaves or the time is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

import pytest
from starlette.types import Message

from gateway.drain import Drain
from gateway.sse import DONE, event_bytes
from gateway.streaming import ClientGone, EventStreamAnswer, run_while_connected
from pipeline.intake.errors import RequestRefused
from pipeline.protocol.stream import StreamEvent


class LineWriter:
    """The smallest writer: knows how to fail."""

    def __init__(self) -> None:
        self.is_complete = False
        self.has_failed = False

    def feed(self, index: int, event: StreamEvent) -> bytes:
        raise NotImplementedError

    def fail(self, error: RequestRefused) -> bytes:
        if self.is_complete:
            return b""
        self.is_complete = self.has_failed = True
        return event_bytes(error.in_stream()) + DONE


class Connection:
    """An ASGI connection whose client can leave or stop reading."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self.has_bytes = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.sent.append(message)
        if message.get("body"):
            self.has_bytes.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def is_ended(self) -> bool:
        return self.sent[-1].get("more_body") is False


class Stage:
    """An answer in the middle of its stream."""

    def __init__(
        self,
        *,
        fails: bool = False,
        loses_cancellation: bool = False,
        write_timeout_s: float = 5.0,
    ) -> None:
        self.connection = Connection()
        self.drain = Drain(0.0)
        self.writer = LineWriter()
        self.num_cut = 0
        self.may_end = asyncio.Event()
        self.is_closed = False
        self._fails = fails
        self._loses_cancellation = loses_cancellation
        self.answer = EventStreamAnswer(
            self._events(), self.writer, self._on_cut, self.drain, write_timeout_s
        )

    async def run(self) -> None:
        await self.answer({"type": "http"}, self.connection.receive, self.connection.send)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: {}\n\n"
            if self._loses_cancellation:
                with suppress(asyncio.CancelledError):
                    await self.may_end.wait()
            await self.may_end.wait()
            if self._fails:
                raise RuntimeError("a bug")
            yield b"data: {}\n\n"
            self.writer.is_complete = True
            yield DONE
        finally:
            self.is_closed = True

    async def _on_cut(self) -> None:
        self.num_cut += 1


async def test_a_stream_that_ends_is_not_cut() -> None:
    stage = Stage()
    stage.may_end.set()
    await stage.run()
    assert stage.connection.body == b"data: {}\n\n" * 2 + DONE
    assert stage.connection.is_ended
    assert (stage.num_cut, stage.is_closed) == (0, True)


async def test_the_answer_says_what_it_is_before_the_first_event() -> None:
    stage = Stage()
    stage.may_end.set()
    await stage.run()
    headers = dict(stage.connection.sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"x-accel-buffering"] == b"no"
    assert b"content-length" not in headers


async def test_a_client_that_leaves_cuts_the_stream_once() -> None:
    stage = Stage()
    running = asyncio.create_task(stage.run())
    await stage.connection.has_bytes.wait()
    stage.connection.leaves.set()
    await running
    assert (stage.num_cut, stage.is_closed) == (1, True)


async def test_a_client_that_left_before_the_first_byte_cuts_the_stream() -> None:
    stage = Stage()
    stage.connection.leaves.set()
    await stage.run()
    assert stage.num_cut == 1


async def test_a_client_that_takes_no_byte_is_given_up() -> None:
    stage = Stage(write_timeout_s=0.05)
    running = asyncio.create_task(stage.run())
    await stage.connection.has_bytes.wait()
    stage.connection.reads.clear()
    stage.may_end.set()
    await running
    assert (stage.num_cut, stage.is_closed) == (1, True)
    assert not stage.connection.is_ended


async def test_at_the_deadline_the_client_gets_an_error_event_and_done() -> None:
    stage = Stage()
    running = asyncio.create_task(stage.run())
    await stage.connection.has_bytes.wait()
    stage.drain.begin(0.0)
    stage.drain.advance(0.0)
    await running
    assert b'"code":"draining"' in stage.connection.body
    assert stage.connection.body.endswith(DONE)
    assert stage.connection.is_ended
    assert stage.num_cut == 1


async def test_a_bug_in_mid_stream_is_told_to_the_client() -> None:
    stage = Stage(fails=True)
    stage.may_end.set()
    await stage.run()
    assert b'"code":"internal_error"' in stage.connection.body
    assert stage.connection.is_ended
    assert stage.num_cut == 1


async def test_work_whose_client_leaves_is_cancelled() -> None:
    connection = Connection()
    is_cancelled = False
    num_cut = 0
    has_begun = asyncio.Event()

    async def work() -> None:
        nonlocal is_cancelled
        try:
            has_begun.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cancelled = True
            raise

    async def on_cut() -> None:
        nonlocal num_cut
        num_cut += 1

    running = asyncio.create_task(
        run_while_connected(work(), connection.receive, Drain(0.0), on_cut)
    )
    await has_begun.wait()
    connection.leaves.set()
    with pytest.raises(ClientGone):
        await running
    assert is_cancelled
    assert num_cut == 1


async def test_work_that_ends_gives_its_result_or_its_error() -> None:
    connection = Connection()
    num_cut = 0

    async def good() -> int:
        return 5

    async def bad() -> int:
        raise ValueError("x")

    async def on_cut() -> None:
        nonlocal num_cut
        num_cut += 1

    assert await run_while_connected(good(), connection.receive, Drain(0.0), on_cut) == 5
    assert num_cut == 0
    with pytest.raises(ValueError, match="x"):
        await run_while_connected(bad(), None, Drain(0.0), on_cut)
    assert num_cut == 1


async def test_a_writer_that_loses_its_cancellation_is_cancelled_again() -> None:
    stage = Stage(loses_cancellation=True)
    running = asyncio.create_task(stage.run())
    await stage.connection.has_bytes.wait()
    stage.connection.leaves.set()
    await running
    assert (stage.num_cut, stage.is_closed) == (1, True)
