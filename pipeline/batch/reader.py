"""Reads a batch file line by line, in flat memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from pipeline.batch.errors import BatchFileInvalid

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
MAX_LINE_BYTES = 16 * 2**20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A custom_id is remembered by 16 bytes of its hash: a million lines take some 80 MB less.
_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input. `line_number` counts from 1, blank lines included."""

    line_number: int
    custom_id: str
    url: str
    body: dict[str, Any]


def id_digest(custom_id: str) -> bytes:
    """A custom_id in 16 bytes, for sets that hold many."""
    return hashlib.blake2b(
        custom_id.encode("utf-8", "surrogatepass"), digest_size=_ID_BYTES
    ).digest()


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """The requests of a file, in order; blank lines, CRLF and a byte order mark are let pass.

    Raises:
        BatchFileInvalid: a line is not a request in OpenAI's batch format.
    """
    with path.open("rb") as file:
        line_number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            line_number += 1
            if len(line) > MAX_LINE_BYTES:
                raise BatchFileInvalid(path, line_number, f"longer than {MAX_LINE_BYTES} bytes")
            if line_number == 1:
                line = line.removeprefix(_BYTE_ORDER_MARK)
            if line.strip():
                yield _parse(path, line_number, line)


def check_requests(path: Path) -> int:
    """Read the whole file once and return how many requests it holds.

    Raises:
        BatchFileInvalid: a line is not a request, or its custom_id stands on an earlier line.
    """
    seen: set[bytes] = set()
    for request in read_requests(path):
        digest = id_digest(request.custom_id)
        if digest in seen:
            problem = f"custom_id {request.custom_id!r} stands on an earlier line too"
            raise BatchFileInvalid(path, request.line_number, problem)
        seen.add(digest)
    return len(seen)


def _parse(path: Path, line_number: int, line: bytes) -> BatchRequest:
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BatchFileInvalid(path, line_number, f"not JSON: {error}") from error
    problem = _find_problem(entry)
    if problem is not None:
        raise BatchFileInvalid(path, line_number, problem)
    return BatchRequest(line_number, entry["custom_id"], entry["url"], entry["body"])


def _find_problem(entry: Any) -> str | None:
    if not isinstance(entry, dict):
        return "not a JSON object"
    custom_id, body = entry.get("custom_id"), entry.get("body")
    requirements = (
        (isinstance(custom_id, str) and custom_id, "custom_id must be a string that is not empty"),
        (entry.get("method") == "POST", 'method must be "POST"'),
        (entry.get("url") in ENDPOINTS, f"url must be one of {', '.join(ENDPOINTS)}"),
        (isinstance(body, dict), "body must be an object"),
        (isinstance(body, dict) and not body.get("stream"), "a batch cannot stream"),
    )
    return next((problem for is_met, problem in requirements if not is_met), None)
