"""The results file: one whole line per finished request, never two for the same one."""

from __future__ import annotations

import fcntl
import os
import time
from io import FileIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from pipeline.batch.errors import ResultsBusy, ResultsDamaged
from pipeline.batch.reader import id_digest

SYNC_INTERVAL_S = 1.0


class ResultsFile:
    """Appends result lines and knows which requests have one already.

    Opening repairs what a crash left: a last line that was cut is removed (its request runs again).
    Each line is one write; the disk is asked to keep it at most once a second.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO = path.open("ab", buffering=0)
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._finished = _repair_and_read(path)
        except BlockingIOError as error:
            self._file.close()
            raise ResultsBusy(path) from error
        except ResultsDamaged:
            self._file.close()
            raise
        self._synced_s = time.monotonic()
        self._is_dirty = False

    @property
    def num_finished(self) -> int:
        """How many requests have their line."""
        return len(self._finished)

    def is_finished(self, custom_id: str) -> bool:
        """True when the request has its line."""
        return id_digest(custom_id) in self._finished

    def append(self, custom_id: str, line: dict[str, Any]) -> None:
        """Write one line.

        Raises:
            OSError: the disk is full or broken; the file then ends with a whole line or a cut one
                that the next opening repairs.
        """
        data = orjson.dumps(line) + b"\n"
        written = self._file.write(data)
        if written != len(data):  # a full disk may take a part
            raise OSError(f"{self.path}: only {written} of {len(data)} bytes were written")
        self._finished.add(id_digest(custom_id))
        self._is_dirty = True

    def sync(self) -> None:
        """Ask the disk to keep what was written."""
        if self._is_dirty:
            self._is_dirty = False  # first: a line may be added while the disk works
            os.fsync(self._file.fileno())
        self._synced_s = time.monotonic()

    @property
    def is_sync_due(self) -> bool:
        """True when lines of more than a second wait for the disk."""
        return self._is_dirty and time.monotonic() - self._synced_s >= SYNC_INTERVAL_S

    def close(self) -> None:
        """Sync and close; idempotent."""
        if not self._file.closed:
            self.sync()
            self._file.close()


def response_line(
    custom_id: str, status: int, request_id: str, body: Any, *, line_id: str | None = None
) -> dict[str, Any]:
    """A result line in OpenAI's batch output format; also for requests that the API refused."""
    return {
        "id": line_id or f"batch_req_{uuid4().hex}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": None,
    }


def unanswered_line(custom_id: str, code: str, message: str, *, line_id: str) -> dict[str, Any]:
    """A result line for a request that was not processed."""
    return {
        "id": line_id,
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }


def _repair_and_read(path: Path) -> set[bytes]:
    finished: set[bytes] = set()
    with path.open("r+b") as file:
        whole_bytes = 0
        for line_number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                file.truncate(whole_bytes)
                break
            whole_bytes += len(line)
            if line.strip():
                finished.add(id_digest(_custom_id(path, line_number, line)))
    return finished


def _custom_id(path: Path, line_number: int, line: bytes) -> str:
    try:
        entry = orjson.loads(line)
        custom_id, _ = entry["custom_id"], entry["response"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ResultsDamaged(path, line_number) from error
    if not isinstance(custom_id, str):
        raise ResultsDamaged(path, line_number)
    return custom_id
