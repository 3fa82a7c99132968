"""Checks an input file and enters its lines, streaming: memory does not grow with the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from pipeline.batch.file_storage import FileStorage
from pipeline.batch.line_source import split_lines
from pipeline.batch.line_store import LinePlace, LineStore
from pipeline.batch.reader import MAX_LINE_BYTES, id_digest
from pipeline.batch.records import BatchRecord, BatchStatus
from pipeline.intake.errors import clip

MAX_REQUESTS = 50_000
MAX_ERRORS = 50
_GROUP_LINES = 1_000
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class LineProblem(Exception):
    """Why a line is no request; `param` is the field of the line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(code, message, param)
        self.code, self.message, self.param = code, message, param

    def __str__(self) -> str:
        return self.message


@dataclass(slots=True)
class Verdict:
    """What a file holds. `errors` are OpenAI's batch errors; with any, the batch must not run."""

    num_lines: int = 0
    model: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)

    def add(self, problem: LineProblem, line: int | None) -> None:
        """Note what is wrong."""
        self.errors.append(
            {
                "code": problem.code,
                "line": line,
                "message": clip(problem.message, 500),
                "param": problem.param,
            }
        )


class Validator:
    """Enters the lines of one batch after the other; synchronous."""

    def __init__(self, lines: LineStore, storage: FileStorage) -> None:
        self._lines = lines
        self._storage = storage

    def run(self, batch: BatchRecord, is_wanted: Callable[[], bool]) -> Verdict | None:
        """Check the whole input. None when `is_wanted` said no in the middle.

        May be repeated: it begins by forgetting what an interrupted one has entered.

        Raises:
            OSError, DatabaseAway: to be tried again.
        """
        self._lines.clear(batch.number, (BatchStatus.VALIDATING,))
        verdict = Verdict()
        group: list[LinePlace] = []
        for place in self._places(batch, verdict):
            group.append(place)
            if len(group) == _GROUP_LINES:
                if not is_wanted():
                    return None
                self._lines.add_lines(batch.number, group)
                group = []
        if not verdict.num_lines and not verdict.errors:
            verdict.add(LineProblem("empty_file", "The file holds no request."), None)
        if verdict.errors:
            self._lines.clear(batch.number, (BatchStatus.VALIDATING,))
        elif group:
            self._lines.add_lines(batch.number, group)
        return verdict

    def _places(self, batch: BatchRecord, verdict: Verdict) -> Iterator[LinePlace]:
        """The good lines up to the first bad one; then only the errors are collected."""
        seen: set[bytes] = set()
        with self._storage.open(batch.input_file_id) as file:
            for number, (start_byte, line) in enumerate(split_lines(file), start=1):
                mark = len(_BYTE_ORDER_MARK) if _has_mark(number, line) else 0
                text = line[mark:]
                if not text.strip():
                    continue
                try:
                    custom_id, model = _check(text, batch.endpoint, seen, verdict.num_lines)
                except LineProblem as problem:
                    verdict.add(problem, number)
                    if len(verdict.errors) >= MAX_ERRORS or problem.code == "too_many_requests":
                        return
                    continue
                verdict.num_lines += 1
                verdict.model = verdict.model or model
                if not verdict.errors:
                    yield LinePlace(number, custom_id, start_byte + mark, len(text))


def _has_mark(number: int, line: bytes) -> bool:
    return number == 1 and line.startswith(_BYTE_ORDER_MARK)


def _check(line: bytes, endpoint: str, seen: set[bytes], num_before: int) -> tuple[str, str | None]:
    """A line's custom_id, which is added to `seen`, and its model.

    Raises:
        LineProblem: it cannot be a request.
    """
    if len(line) > MAX_LINE_BYTES:
        raise LineProblem("line_too_long", f"The line is longer than {MAX_LINE_BYTES} bytes.")
    if num_before >= MAX_REQUESTS:
        message = f"The file has more than {MAX_REQUESTS} requests."
        raise LineProblem("too_many_requests", message)
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise LineProblem("invalid_json_line", f"The line is not valid JSON: {error}.") from error
    if not isinstance(entry, dict):
        raise LineProblem("invalid_json_line", "The line is not a JSON object.")
    _check_fields(entry, endpoint)
    custom_id: str = entry["custom_id"]
    digest = id_digest(custom_id)
    if digest in seen:
        message = f"The custom_id '{clip(custom_id)}' stands on an earlier line too."
        raise LineProblem("duplicate_custom_id", message, "custom_id")
    seen.add(digest)
    model = entry["body"].get("model")
    return custom_id, model if isinstance(model, str) else None


def _check_fields(entry: dict[str, Any], endpoint: str) -> None:
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        message = "custom_id must be a string that is not empty."
        raise LineProblem("invalid_custom_id", message, "custom_id")
    if entry.get("method") != "POST":
        raise LineProblem("invalid_method", "method must be 'POST'.", "method")
    if entry.get("url") != endpoint:
        message = f"url must be the endpoint of the batch, '{endpoint}'."
        raise LineProblem("invalid_url", message, "url")
    if not isinstance(entry.get("body"), dict):
        raise LineProblem("invalid_body", "body must be an object.", "body")
