"""A file's bytes as an answer: exact, as long as announced, in ranges if asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import BinaryIO
from urllib.parse import quote

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from gateway.drain import Drain
from pipeline.batch.records import FileRecord
from pipeline.intake.errors import INVALID_REQUEST, RequestRefused

READ_BYTES = 256 << 10
_PARTIAL, _WHOLE = 206, 200
_UNIT = "bytes="


class RangeUnsatisfiable(RequestRefused):
    """The range lies behind the end."""

    def __init__(self, num_bytes: int) -> None:
        message = f"The range lies outside of the file's {num_bytes} bytes."
        super().__init__(416, INVALID_REQUEST, "invalid_range", None, message)


def file_answer(request: Request, record: FileRecord, file: BinaryIO, drain: Drain) -> Response:
    """The file, or the part that `Range` asks for; closes `file` in the end.

    A file never changes, so its id is its ETag. Several ranges at once are answered with the whole.

    Raises:
        RangeUnsatisfiable: `file` is closed.
    """
    etag = f'"{record.id}"'
    headers = {
        "accept-ranges": "bytes",
        "etag": etag,
        "x-content-type-options": "nosniff",
        "content-disposition": f"attachment; filename*=UTF-8''{quote(record.name, safe='')}",
    }
    wanted = None
    if request.headers.get("if-range", etag) == etag:
        try:
            wanted = byte_range(request.headers.get("range", ""), record.num_bytes)
        except RangeUnsatisfiable:
            file.close()
            raise
    start, stop = wanted or (0, record.num_bytes)
    if wanted is not None:
        headers["content-range"] = f"bytes {start}-{stop - 1}/{record.num_bytes}"
    headers["content-length"] = str(stop - start)
    status = _WHOLE if wanted is None else _PARTIAL
    media_type = "application/octet-stream"
    if request.method == "HEAD":
        file.close()
        return Response(None, status, headers, media_type)
    return StreamingResponse(_parts(file, start, stop, drain), status, headers, media_type)


def byte_range(header: str, num_bytes: int) -> tuple[int, int] | None:
    """(First byte, byte behind the last) of a `Range` header; None if there is no single range.

    Raises:
        RangeUnsatisfiable: the file has no such byte.
    """
    first, dash, last = header.removeprefix(_UNIT).strip().partition("-")
    is_plain = all(not text or (text.isascii() and text.isdigit()) for text in (first, last))
    if not header.startswith(_UNIT) or not dash or not is_plain or not (first or last):
        return None
    if not first:
        start, stop = max(0, num_bytes - int(last)), num_bytes
    else:
        start, stop = int(first), min(int(last) + 1 if last else num_bytes, num_bytes)
        if last and int(last) < start:
            return None
    if start >= stop:
        raise RangeUnsatisfiable(num_bytes)
    return start, stop


async def _parts(
    file: BinaryIO, start: int, stop: int, drain: Drain
) -> AsyncGenerator[bytes, None]:
    try:
        with drain.active():
            await asyncio.to_thread(file.seek, start)
            while start < stop:
                part = await asyncio.to_thread(file.read, min(READ_BYTES, stop - start))
                if not part:
                    return  # the server notices that bytes are missing and closes the connection
                start += len(part)
                yield part
    finally:
        file.close()
