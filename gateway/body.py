"""Reading a request body: typed, bounded, not a byte more than needed."""

from __future__ import annotations

from fastapi import Request
from starlette.requests import ClientDisconnect

from gateway.http_errors import BodyTooLarge, MediaTypeUnsupported
from pipeline.intake.errors import BrokenBody

_UTF8 = ("utf-8", "utf8", "us-ascii")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body of a JSON request.

    A body that announces its length is refused before it is read, another as soon as it passes the
    limit; the server throws away what still arrives of it.

    Raises:
        MediaTypeUnsupported: not application/json, another charset, or compressed.
        BodyTooLarge: more than `max_bytes`.
        BrokenBody: the client went away in the middle.
    """
    _check_media_type(request)
    announced = request.headers.get("content-length", "0")
    if not announced.isascii() or not announced.isdigit() or int(announced) > max_bytes:
        raise BodyTooLarge(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise BodyTooLarge(max_bytes)
            parts.append(part)
    except ClientDisconnect as error:
        raise BrokenBody("The body ended early.") from error
    return b"".join(parts)


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
