"""Reading a request body: typed, bounded, not a byte more than needed, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from fastapi import Request
from starlette.requests import ClientDisconnect

from gateway.http_errors import BodyStalled, BodyTooLarge, MediaTypeUnsupported, QueueFull
from pipeline.intake.errors import BrokenBody

_UTF8 = ("utf-8", "utf8", "us-ascii")
_RETRY_AFTER_S = 1


class BodyReader:
    """Reads the JSON bodies of one process; event loop only.

    A body has at most `max_bytes`, all that are in memory at once `max_pending_bytes`: one alone is always
    taken. `stall_s` is how long a client may send nothing.
    """

    def __init__(self, max_bytes: int, max_pending_bytes: int, stall_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_pending_bytes = max_pending_bytes
        self._stall_s = stall_s
        self._num_pending_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body; it counts as in memory until the block ends.

        A body that announces its length is refused before it is read, another as soon as it passes the
        limit; the server throws away what still arrives of it.

        Raises:
            MediaTypeUnsupported: not application/json, another charset, or compressed.
            BodyTooLarge: more than `max_bytes`.
            BodyStalled, BrokenBody: the client stopped or went away in the middle.
            QueueFull: too much lies in memory already.
        """
        _check_media_type(request)
        announced = request.headers.get("content-length", "0")
        if not announced.isascii() or not announced.isdigit() or int(announced) > self._max_bytes:
            raise BodyTooLarge(self._max_bytes)
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with aclosing(arriving_parts(request, self._stall_s)) as arriving:
                async for part in arriving:
                    num_bytes += len(part)
                    self._num_pending_bytes += len(part)
                    self._check(num_bytes)
                    parts.append(part)
            yield b"".join(parts)
        finally:
            self._num_pending_bytes -= num_bytes

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise BodyTooLarge(self._max_bytes)
        if num_bytes < self._num_pending_bytes > self._max_pending_bytes:
            raise QueueFull(_RETRY_AFTER_S)


async def arriving_parts(request: Request, stall_s: float) -> AsyncGenerator[bytes, None]:
    """A body as it comes.

    Raises:
        BodyStalled: nothing came for so long.
        BrokenBody: the client went away in the middle.
    """
    parts = request.stream()
    while True:
        try:
            async with asyncio.timeout(stall_s):
                part = await anext(parts, None)
        except TimeoutError:
            raise BodyStalled from None
        except ClientDisconnect as error:
            raise BrokenBody("The body ended early.") from error
        if part is None:
            return
        yield part


def _check_media_type(request: Request) -> None:
    media_type, *parameters = request.headers.get("content-type", "").lower().split(";")
    is_json = media_type.strip() == "application/json"
    for parameter in parameters:
        name, _, value = parameter.strip().partition("=")
        if name == "charset" and value.strip('"') not in _UTF8:
            is_json = False
    encoding = request.headers.get("content-encoding", "identity").lower()
    if not is_json or encoding not in ("", "identity"):
        raise MediaTypeUnsupported
