"""Files and batches as rows of the database, and as the objects that clients get."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Self, TypeVar

import sqlalchemy as sa

COMPLETION_WINDOW = "24h"


class FilePurpose(StrEnum):
    """What a file is for; clients upload the first kind only."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class BatchStatus(StrEnum):
    """Where a batch stands, in OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


UNFINISHED = (
    BatchStatus.VALIDATING,
    BatchStatus.IN_PROGRESS,
    BatchStatus.FINALIZING,
    BatchStatus.CANCELLING,
)
ENDED = tuple(status for status in BatchStatus if status not in UNFINISHED)
# Statuses with a time of their own; the one of validating is `created_at`.
_TIMES = tuple(status for status in BatchStatus if status is not BatchStatus.VALIDATING)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file. `number` is its place among all files, `expires_s` None means never."""

    number: int
    id: str
    name: str
    purpose: str
    num_bytes: int
    created_s: int
    expires_s: int | None

    @classmethod
    def of_row(cls, row: sa.Row[Any]) -> Self:
        """From a row of `tables.FILES`."""
        return cls(
            number=row.number,
            id=row.id,
            name=json.loads(row.name_json),
            purpose=row.purpose,
            num_bytes=row.num_bytes,
            created_s=row.created_s,
            expires_s=row.expires_s,
        )

    def as_object(self) -> dict[str, Any]:
        """OpenAI's FileObject. Uploads are complete at once, so the status never changes."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch; times are Unix seconds, `times` those at which a status began.

    `model` is its first line's, `models` are those that its lines may ask for; None: all.
    """

    number: int
    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    output_lifetime_s: int | None
    status: BatchStatus
    errors: list[dict[str, Any]] | None
    metadata: dict[str, str] | None
    model: str | None
    models: frozenset[str] | None
    created_s: int
    expires_s: int
    times: dict[str, int | None]
    num_lines: int
    num_completed: int
    num_failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int

    @classmethod
    def of_row(cls, row: sa.Row[Any]) -> Self:
        """From a row of `tables.BATCHES`."""
        fields = row._asdict()
        kept = {name: fields[name] for name in cls.__dataclass_fields__ if name in fields}
        kept["status"] = BatchStatus(row.status)
        kept["errors"] = json.loads(row.errors_json) if row.errors_json else None
        kept["metadata"] = json.loads(row.metadata_json) if row.metadata_json else None
        kept["models"] = frozenset(json.loads(row.models_json)) if row.models_json else None
        kept["times"] = {str(status): fields[f"{status}_s"] for status in _TIMES}
        return cls(**kept)

    def as_object(self) -> dict[str, Any]:
        """OpenAI's Batch."""
        errors = None if self.errors is None else {"object": "list", "data": self.errors}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": COMPLETION_WINDOW,
            "status": str(self.status),
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            **{f"{status}_at": began_s for status, began_s in self.times.items()},
            "request_counts": {
                "total": self.num_lines,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "usage": self._usage(),
            "metadata": self.metadata,
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


_Record = TypeVar("_Record", FileRecord, BatchRecord)


@dataclass(frozen=True, slots=True)
class PageQuery:
    """Which part of a list: `limit` records behind the one called `after`."""

    limit: int
    after: str | None = None
    ascending: bool = False


@dataclass(frozen=True, slots=True)
class Page(Generic[_Record]):
    """One page of a list, in its order."""

    records: Sequence[_Record]
    has_more: bool

    def as_object(self) -> dict[str, Any]:
        """OpenAI's cursor page."""
        objects = [record.as_object() for record in self.records]
        return {
            "object": "list",
            "data": objects,
            "first_id": objects[0]["id"] if objects else None,
            "last_id": objects[-1]["id"] if objects else None,
            "has_more": self.has_more,
        }
