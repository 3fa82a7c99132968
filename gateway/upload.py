"""Reading a file upload (multipart/form-data) in flat memory: large ones wait on the disk."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO

from fastapi import Request
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from gateway.body import arriving_parts
from gateway.http_errors import BodyTooLarge, MediaTypeUnsupported
from pipeline.batch.batch_body import MAX_LIFETIME_S, MIN_LIFETIME_S
from pipeline.batch.records import FilePurpose
from pipeline.intake.errors import BrokenBody, InvalidField, UnsupportedField

# Boundaries, part headers and the other fields come on top of the file.
_ENVELOPE_BYTES = 64 << 10
_MAX_FIELDS = 16
_MAX_FIELD_BYTES = 4 << 10
_OTHER_PURPOSES = ("assistants", "evals", "fine-tune", "user_data", "vision")


@dataclass(frozen=True, slots=True)
class Upload:
    """A file as it was sent; `name` is for people only. `lifetime_s` None: the default."""

    name: str
    content: BinaryIO
    lifetime_s: int | None


@asynccontextmanager
async def read_upload(request: Request, max_bytes: int, stall_s: float) -> AsyncIterator[Upload]:
    """The file of an upload for batches; its content is gone when the block ends.

    `stall_s` is how long the client may send nothing.

    Raises:
        MediaTypeUnsupported: not multipart/form-data.
        BodyTooLarge: the file has more than `max_bytes`.
        BodyStalled: the client stopped in the middle.
        BrokenBody: the form is broken, or the client went away.
        InvalidField, UnsupportedField: a field is missing or has a wrong value.
    """
    media_type = request.headers.get("content-type", "").lower()
    if media_type.partition(";")[0].strip() != "multipart/form-data":
        raise MediaTypeUnsupported("multipart/form-data")
    announced = request.headers.get("content-length", "0")
    if not announced.isascii() or not announced.isdigit():
        raise BrokenBody("The Content-Length is not a number.")
    if int(announced) > max_bytes + _ENVELOPE_BYTES:
        raise BodyTooLarge(max_bytes)
    parser = _FormParser(request, max_bytes, stall_s)
    try:
        upload = _check(await _parsed(parser))
        if _size(upload.content) > max_bytes:
            raise BodyTooLarge(max_bytes)
        yield upload
    finally:
        parser.close_files()


class _FormParser(MultiPartParser):
    """Starlette's parser, bounded; it forgets to close the file of a form that ends too early."""

    def __init__(self, request: Request, max_bytes: int, stall_s: float) -> None:
        super().__init__(
            request.headers,
            _bounded(request, max_bytes, stall_s),
            max_files=1,
            max_fields=_MAX_FIELDS,
            max_part_size=_MAX_FIELD_BYTES,
        )

    def close_files(self) -> None:
        for file in self._files_to_close_on_error:
            file.close()


async def _parsed(parser: _FormParser) -> FormData:
    try:
        return await parser.parse()
    except MultiPartException as error:
        raise BrokenBody(f"The form cannot be read: {error.message}") from error


async def _bounded(request: Request, max_bytes: int, stall_s: float) -> AsyncGenerator[bytes, None]:
    num_bytes = 0
    async for part in arriving_parts(request, stall_s):
        num_bytes += len(part)
        if num_bytes > max_bytes + _ENVELOPE_BYTES:
            raise BodyTooLarge(max_bytes)
        yield part


def _check(form: FormData) -> Upload:
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise InvalidField("file", "file is required, as a part with a filename.")
    purpose = form.get("purpose")
    if not isinstance(purpose, str) or not purpose:
        raise InvalidField("purpose", "purpose is required.")
    if purpose in _OTHER_PURPOSES:
        raise UnsupportedField("purpose", "The only purpose that is supported is 'batch'.")
    if purpose != FilePurpose.BATCH:
        raise InvalidField("purpose", "purpose must be 'batch'.")
    return Upload(file.filename or "", file.file, _lifetime_s(form))


def _lifetime_s(form: FormData) -> int | None:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidField("expires_after.anchor", "expires_after.anchor must be 'created_at'.")
    if not isinstance(seconds, str) or not seconds.isascii() or not seconds.isdigit():
        raise InvalidField("expires_after.seconds", "expires_after.seconds must be an integer.")
    if len(seconds) > len(str(MAX_LIFETIME_S)) or not (
        MIN_LIFETIME_S <= int(seconds) <= MAX_LIFETIME_S
    ):
        message = f"expires_after.seconds must be {MIN_LIFETIME_S} to {MAX_LIFETIME_S}."
        raise InvalidField("expires_after.seconds", message)
    return int(seconds)


def _size(content: BinaryIO) -> int:
    end = content.seek(0, 2)
    content.seek(0)
    return end
