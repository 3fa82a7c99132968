"""Lines of an input file as they lie in it, and in the order in which they shall run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, BinaryIO

import orjson

from pipeline.batch.file_storage import FileStorage
from pipeline.batch.line_store import LinePlace, LineStore
from pipeline.batch.reader import MAX_LINE_BYTES
from pipeline.batch.records import BatchRecord

READ_BYTES = 1 << 20
LOOK_AHEAD_LINES = 1_024
LOOK_AHEAD_BYTES = 8 << 20
# Beyond this a common prefix fills so many blocks that its end does not matter for the order.
_PREFIX_CHARS = 2_048


@dataclass(frozen=True, slots=True)
class LineText:
    """One line as it stands in the file; `data` is JSON, maybe between blanks, `model` whom it asks."""

    place: LinePlace
    data: bytes
    model: str

    def body(self) -> dict[str, Any]:
        """The request's body. The line was validated before it was entered."""
        body: dict[str, Any] = orjson.loads(self.data)["body"]
        return body


class LineSource:
    """Reads the unanswered lines of one batch, a window at a time. Synchronous; one thread at a time.

    Within a window (1,024 lines, 8 MiB) lines are sorted by the text of their prompts, so that
    prompts with a common prefix run one after the other, while its KV blocks are cached.
    """

    def __init__(self, lines: LineStore, storage: FileStorage, batch: BatchRecord) -> None:
        self._lines = lines
        self._batch = batch
        self._file = storage.open(batch.input_file_id)
        self._last_line = 0

    def next_window(self) -> list[LineText]:
        """The next lines; empty when there are no more.

        Raises:
            OSError, DatabaseAway: nothing was skipped, call again.
        """
        places = self._lines.pending(
            self._batch.number, after_line=self._last_line, limit=LOOK_AHEAD_LINES
        )
        window: list[tuple[str, LineText]] = []
        num_bytes = 0
        for place in places:
            num_bytes += place.num_bytes
            if window and num_bytes > LOOK_AHEAD_BYTES:
                break
            self._file.seek(place.start_byte)
            data = self._file.read(place.num_bytes)
            body = orjson.loads(data)["body"]
            line = LineText(place, data, str(body.get("model")))
            window.append((prompt_prefix(body), line))
        if window:
            self._last_line = window[-1][1].place.line
        return [line for _, line in sorted(window, key=itemgetter(0))]

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


def split_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """(First byte, line with its LF) of a file, in flat memory.

    A line over `MAX_LINE_BYTES` is cut: the first `MAX_LINE_BYTES` + 1 of its bytes come, the rest is
    passed over.
    """
    start_byte, held = 0, b""
    while part := file.read(READ_BYTES):
        *whole, rest = part.split(b"\n")
        for piece in whole:
            line = held + piece + b"\n"
            yield start_byte, line[: MAX_LINE_BYTES + 1]
            start_byte += len(line)
            held = b""
        held += rest
        if len(held) > 2 * MAX_LINE_BYTES:  # its end is far: only its length counts
            yield start_byte, held[: MAX_LINE_BYTES + 1]
            start_byte, held = _skip_line(file, start_byte + len(held))
    if held:
        yield start_byte, held[: MAX_LINE_BYTES + 1]


def _skip_line(file: BinaryIO, position: int) -> tuple[int, bytes]:
    """Read past the next LF; (position of what follows it, what was read of that)."""
    while part := file.read(READ_BYTES):
        _, newline, rest = part.partition(b"\n")
        if newline:
            return position + len(part) - len(rest), rest
        position += len(part)
    return position, b""


def prompt_prefix(body: Mapping[str, Any]) -> str:
    """What a request's prompt begins with, as text to sort by; any body has one."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return _text_of(body.get("prompt"))
    text = ""
    for message in messages:
        if isinstance(message, dict) and len(text) < _PREFIX_CHARS:
            text += f"{_text_of(message.get('role'))}\n{_text_of(message.get('content'))}\n"
    return text[:_PREFIX_CHARS]


def _text_of(value: object) -> str:
    """Text, token ids or content parts as text; bounded, whatever the value holds."""
    if isinstance(value, str):
        return value[:_PREFIX_CHARS]
    if not isinstance(value, list):
        return ""
    parts = (item.get("text") if isinstance(item, dict) else item for item in value[:_PREFIX_CHARS])
    return " ".join(str(part) for part in parts if isinstance(part, str | int))[:_PREFIX_CHARS]
