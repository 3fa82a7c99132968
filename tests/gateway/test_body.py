"""Bodies are bounded one by one and all together, and none is waited for for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import Request

from gateway.body import BodyReader
from gateway.http_errors import BodyStalled, BodyTooLarge, QueueFull
from pipeline.intake.errors import BrokenBody

STALL_S = 0.05
MAX, PENDING = 100, 150


def reader(max_pending_bytes: int = PENDING) -> BodyReader:
    return BodyReader(MAX, max_pending_bytes, STALL_S)


def request(*parts: bytes, ends: str = "whole", announced: int | None = None) -> Request:
    """A POST whose body comes in parts, and then ends whole, stalls, or breaks off."""
    messages: list[dict[str, Any]] = [
        {"type": "http.request", "body": part, "more_body": True} for part in parts
    ]
    if ends == "whole":
        messages.append({"type": "http.request", "body": b"", "more_body": False})
    elif ends == "gone":
        messages.append({"type": "http.disconnect"})

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    headers = [(b"content-type", b"application/json")]
    if announced is not None:
        headers.append((b"content-length", str(announced).encode()))
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


async def read(bodies: BodyReader, asked: Request) -> bytes:
    async with bodies.read(asked) as data:
        return data


async def test_a_body_comes_whole_however_many_parts_it_has() -> None:
    assert await read(reader(), request(b"a", b"bc", b"")) == b"abc"


async def test_a_client_that_stops_in_the_middle_is_given_up() -> None:
    with pytest.raises(BodyStalled) as stalled:
        await asyncio.wait_for(read(reader(), request(b"a", ends="stalls")), 5)
    assert (stalled.value.status, stalled.value.code) == (408, "request_timeout")


async def test_a_client_that_is_gone_is_not_waited_for() -> None:
    with pytest.raises(BrokenBody):
        await read(reader(), request(b"a", ends="gone"))


async def test_one_body_has_a_limit_announced_or_not() -> None:
    with pytest.raises(BodyTooLarge):
        await read(reader(), request(announced=MAX + 1))
    with pytest.raises(BodyTooLarge):
        await read(reader(), request(b"x" * MAX, b"x"))


async def test_all_bodies_in_memory_have_a_limit_together() -> None:
    bodies = reader()
    async with bodies.read(request(b"x" * MAX)):
        with pytest.raises(QueueFull) as full:
            await read(bodies, request(b"x" * (PENDING - MAX), b"x"))
        assert (full.value.status, full.value.retry_after_s) == (503, 1)
        assert await read(bodies, request(b"x" * (PENDING - MAX))), "the refused one holds nothing"
    assert await read(bodies, request(b"x" * MAX))


async def test_one_body_alone_is_always_taken() -> None:
    bodies = reader(max_pending_bytes=10)
    assert await read(bodies, request(b"x" * MAX))
    assert await read(bodies, request(b"x" * MAX))


async def test_what_stalls_or_breaks_off_is_counted_no_more() -> None:
    bodies = reader()
    for asked in (request(b"x" * MAX, ends="stalls"), request(b"x" * MAX, ends="gone")):
        with pytest.raises((BodyStalled, BrokenBody)):
            await asyncio.wait_for(read(bodies, asked), 5)
    async with bodies.read(request(b"x" * MAX)):
        assert await read(bodies, request(b"x" * (PENDING - MAX)))
