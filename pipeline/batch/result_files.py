"""Writes the output and the error file of a batch from its rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO

import orjson

from pipeline.batch.batch_store import BatchEnd
from pipeline.batch.file_storage import FileStorage
from pipeline.batch.file_store import DEFAULT_LIFETIME_S, new_file_id
from pipeline.batch.line_run import line_digest
from pipeline.batch.line_store import EndedLine, LineStore
from pipeline.batch.records import BatchRecord, BatchStatus, FilePurpose, FileRecord
from pipeline.batch.results import unanswered_line

_REASONS = {
    BatchStatus.CANCELLED: ("batch_cancelled", "The batch was cancelled before this request."),
    BatchStatus.EXPIRED: ("batch_expired", "The batch expired before this request was finished."),
    BatchStatus.COMPLETED: ("batch_failed", "The request was not processed."),
}


@dataclass(slots=True)
class _ResultFile:
    """One file that is being written; it exists once it has a line."""

    storage: FileStorage
    file_id: str
    num_lines: int = 0
    num_bytes: int = 0
    file: BinaryIO | None = None

    def add(self, stack: ExitStack, line: bytes) -> None:
        if self.file is None:
            self.file = stack.enter_context(self.storage.writing(self.file_id))
        self.file.write(line + b"\n")
        self.num_lines += 1
        self.num_bytes += len(line) + 1


class ResultFiles:
    """Writes in flat memory; synchronous."""

    def __init__(self, lines: LineStore, storage: FileStorage) -> None:
        self._lines = lines
        self._storage = storage

    def write(self, batch: BatchRecord, status: BatchStatus, now_s: int) -> BatchEnd:
        """Every line of the batch goes into one of two files, by what became of it.

        Nobody knows of the files before `BatchStore.finish`; `discard` them when that says no.

        Raises:
            OSError, DatabaseAway: nothing was written.
        """
        output = _ResultFile(self._storage, new_file_id())
        errors = _ResultFile(self._storage, new_file_id())
        with ExitStack() as stack:
            for is_success, line in self._result_lines(batch, status):
                (output if is_success else errors).add(stack, line)
        return BatchEnd(
            status=status,
            num_completed=output.num_lines,
            num_failed=errors.num_lines,
            output=_record(batch, output, f"{batch.id}_output.jsonl", now_s),
            errors=_record(batch, errors, f"{batch.id}_error.jsonl", now_s),
        )

    def discard(self, end: BatchEnd) -> None:
        """Remove the bytes that `write` has written."""
        for file in (end.output, end.errors):
            if file is not None:
                self._storage.remove(file.id)

    def _result_lines(
        self, batch: BatchRecord, status: BatchStatus
    ) -> Iterator[tuple[bool, bytes]]:
        for line in self._lines.ended(batch.number):
            if line.output is not None:
                yield line.is_success, line.output
            else:
                yield False, _unanswered(batch, line, status)


def _unanswered(batch: BatchRecord, line: EndedLine, status: BatchStatus) -> bytes:
    code, message = _REASONS[status]
    line_id = f"batch_req_{line_digest(batch.id, line.line)}"
    return orjson.dumps(unanswered_line(line.custom_id, code, message, line_id=line_id))


def _record(batch: BatchRecord, file: _ResultFile, name: str, now_s: int) -> FileRecord | None:
    if not file.num_lines:
        return None
    return FileRecord(
        number=0,
        id=file.file_id,
        name=name,
        purpose=FilePurpose.BATCH_OUTPUT,
        num_bytes=file.num_bytes,
        created_s=now_s,
        expires_s=now_s + (batch.output_lifetime_s or DEFAULT_LIFETIME_S),
    )
