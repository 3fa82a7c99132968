"""Batches in the database: one row each, and only these ways from one status to the next.

validating → in_progress → finalizing → completed        validating → failed
validating, in_progress → cancelling → cancelled         in_progress → expired

Every step names the status that it leaves, so a step that comes twice or too late changes nothing.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from pipeline.batch.database import Database
from pipeline.batch.file_store import find_file, insert_file, page_rows
from pipeline.batch.records import (
    UNFINISHED,
    BatchRecord,
    BatchStatus,
    FilePurpose,
    FileRecord,
    Page,
    PageQuery,
)
from pipeline.batch.refusals import FileEmpty, ObjectUnknown, PurposeWrong, TooLateToCancel
from pipeline.batch.tables import BATCHES

_CANCELLABLE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
_CANCELLED = (BatchStatus.CANCELLING, BatchStatus.CANCELLED)


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """What a client asks for. `output_lifetime_s` None: the default of files.

    `models` are the names that its lines may ask for; None: all.
    """

    input_file_id: str
    endpoint: str
    metadata: Mapping[str, str] | None = None
    output_lifetime_s: int | None = None
    models: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """How a batch ends: its last status, the files that were written and the lines in them."""

    status: BatchStatus
    num_completed: int
    num_failed: int
    output: FileRecord | None = None
    errors: FileRecord | None = None


class BatchStore:
    """Batches of all tenants; synchronous, for any thread. Another tenant's batch does not exist.

    Where a tenant may be None, that means everybody's.
    """

    def __init__(self, database: Database, *, deadline_s: float) -> None:
        self._database = database
        self._deadline_s = deadline_s

    def create(self, tenant: str, order: BatchOrder, now_s: int) -> BatchRecord:
        """Enter a new batch; the runner finds it.

        Raises:
            ObjectUnknown, PurposeWrong, FileEmpty: the input file will not do.
        """
        batch_id = f"batch_{secrets.token_hex(16)}"
        with self._database.writing() as connection:
            file = find_file(
                connection, tenant, order.input_file_id, now_s, param="input_file_id", locks=True
            )
            if file.purpose != FilePurpose.BATCH:
                raise PurposeWrong(file.purpose)
            if not file.num_bytes:
                raise FileEmpty
            connection.execute(
                sa.insert(BATCHES).values(
                    id=batch_id,
                    tenant=tenant,
                    endpoint=order.endpoint,
                    input_file_id=order.input_file_id,
                    output_lifetime_s=order.output_lifetime_s,
                    status=str(BatchStatus.VALIDATING),
                    metadata_json=None if order.metadata is None else json.dumps(order.metadata),
                    models_json=None if order.models is None else json.dumps(sorted(order.models)),
                    created_s=now_s,
                    expires_s=now_s + round(self._deadline_s),
                )
            )
            return _find(connection, tenant, batch_id)

    def find(self, tenant: str | None, batch_id: str) -> BatchRecord:
        """A tenant's batch. Raises `ObjectUnknown`."""
        with self._database.reading() as connection:
            return _find(connection, tenant, batch_id)

    def page(self, tenant: str, query: PageQuery) -> Page[BatchRecord]:
        """A part of a tenant's list. Raises `ObjectUnknown`: no batch is called `query.after`."""
        with self._database.reading() as connection:
            rows, has_more = page_rows(connection, BATCHES, query, [BATCHES.c.tenant == tenant])
        return Page([BatchRecord.of_row(row) for row in rows], has_more)

    def cancel(self, tenant: str | None, batch_id: str, now_s: int) -> BatchRecord:
        """Begin to cancel; a batch that is being cancelled, or was, stays as it is.

        Raises:
            ObjectUnknown: there is none.
            TooLateToCancel: it is over, or its files are being written.
        """
        with self._database.writing() as connection:
            found = _find(connection, tenant, batch_id)
            if found.status in _CANCELLED:
                return found
            if found.status not in _CANCELLABLE:
                raise TooLateToCancel(found.status)
            fields = {"cancelling_s": now_s}
            _move(connection, found.number, _CANCELLABLE, BatchStatus.CANCELLING, fields)
            return _find(connection, tenant, batch_id)

    def unfinished(self, limit: int, active: Collection[int] = ()) -> list[BatchRecord]:
        """Batches that need work, oldest first: those of these numbers, and of the others `limit` at most.

        Where there are more, the oldest of each model and tenant go before the second ones, and so on, so
        that however many of one cannot hide those of another.
        """
        c = BATCHES.c
        place = sa.func.row_number().over(partition_by=(c.model, c.tenant), order_by=c.number)
        ranked = sa.select(BATCHES, place.label("place")).where(c.status.in_(UNFINISHED)).subquery()
        is_active = ranked.c.number.in_(sorted(active))
        wanted = sa.select(ranked).order_by(~is_active, ranked.c.place, ranked.c.number)
        with self._database.reading() as connection:
            rows = connection.execute(wanted.limit(limit + len(active))).all()
        return sorted((BatchRecord.of_row(row) for row in rows), key=lambda batch: batch.number)

    def load(self, number: int) -> BatchRecord:
        """A batch that exists, as it stands now."""
        wanted = sa.select(BATCHES).where(BATCHES.c.number == number)
        with self._database.reading() as connection:
            return BatchRecord.of_row(connection.execute(wanted).one())

    def accept(self, number: int, num_lines: int, model: str | None, now_s: int) -> bool:
        """All lines are entered: let them run. False if the batch was cancelled meanwhile."""
        fields = {"num_lines": num_lines, "model": model, "in_progress_s": now_s}
        return self._moved(number, (BatchStatus.VALIDATING,), BatchStatus.IN_PROGRESS, fields)

    def fail(self, number: int, errors: Sequence[Mapping[str, Any]], now_s: int) -> bool:
        """The input is no batch. False if the batch was cancelled meanwhile."""
        fields = {"errors_json": json.dumps(list(errors)), "failed_s": now_s}
        return self._moved(number, (BatchStatus.VALIDATING,), BatchStatus.FAILED, fields)

    def begin_finalizing(self, number: int, now_s: int) -> bool:
        """Every line has its result. False if the batch was cancelled meanwhile."""
        fields = {"finalizing_s": now_s}
        return self._moved(number, (BatchStatus.IN_PROGRESS,), BatchStatus.FINALIZING, fields)

    def finish(self, batch: BatchRecord, end: BatchEnd, now_s: int) -> bool:
        """Enter the files and the last status, all at once; False if the batch has moved on."""
        fields: dict[str, Any] = {
            f"{end.status}_s": now_s,
            "num_completed": end.num_completed,
            "num_failed": end.num_failed,
        }
        if end.output is not None:
            fields["output_file_id"] = end.output.id
        if end.errors is not None:
            fields["error_file_id"] = end.errors.id
        with self._database.writing() as connection:
            if not _move(connection, batch.number, (batch.status,), end.status, fields):
                return False
            for file in (end.output, end.errors):
                if file is not None:
                    insert_file(connection, batch.tenant, file)
        return True

    def _moved(
        self,
        number: int,
        leaving: Sequence[BatchStatus],
        to: BatchStatus,
        fields: Mapping[str, Any],
    ) -> bool:
        with self._database.writing() as connection:
            return _move(connection, number, leaving, to, fields)


def _find(connection: sa.Connection, tenant: str | None, batch_id: str) -> BatchRecord:
    wanted = sa.select(BATCHES).where(BATCHES.c.id == batch_id.replace("\0", ""))
    if tenant is not None:
        wanted = wanted.where(BATCHES.c.tenant == tenant)
    row = connection.execute(wanted).first()
    if row is None:
        raise ObjectUnknown("batch")
    return BatchRecord.of_row(row)


def _move(
    connection: sa.Connection,
    number: int,
    leaving: Sequence[BatchStatus],
    to: BatchStatus,
    fields: Mapping[str, Any],
) -> bool:
    is_it = (BATCHES.c.number == number) & BATCHES.c.status.in_([str(status) for status in leaving])
    moved = connection.execute(sa.update(BATCHES).where(is_it).values(status=str(to), **fields))
    return bool(moved.rowcount)
