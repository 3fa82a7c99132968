"""Files: rows in the database, bytes in the storage. Bytes come first and go last."""

from __future__ import annotations

import json
import secrets
from typing import Any, BinaryIO

import sqlalchemy as sa
import structlog

from pipeline.batch.database import Database
from pipeline.batch.file_storage import FileStorage
from pipeline.batch.records import UNFINISHED, FilePurpose, FileRecord, Page, PageQuery
from pipeline.batch.refusals import FileInUse, ObjectUnknown
from pipeline.batch.tables import BATCHES, FILES

log = structlog.get_logger(__name__)

DEFAULT_LIFETIME_S = 30 * 86_400
_PURGE_LIMIT = 100


def new_file_id() -> str:
    """An id that nobody can guess; it is also the name of the bytes."""
    return f"file-{secrets.token_hex(16)}"


class FileStore:
    """Files of all tenants; synchronous, for any thread. Another tenant's file does not exist."""

    def __init__(self, database: Database, storage: FileStorage) -> None:
        self._database = database
        self.storage = storage

    def create(
        self, tenant: str, name: str, source: BinaryIO, lifetime_s: int | None, now_s: int
    ) -> FileRecord:
        """Keep an upload.

        Raises:
            OSError, DatabaseAway: it was not kept.
        """
        file_id = new_file_id()
        num_bytes = self.storage.copy_in(file_id, source)
        record = FileRecord(
            number=0,
            id=file_id,
            name=name,
            purpose=FilePurpose.BATCH,
            num_bytes=num_bytes,
            created_s=now_s,
            expires_s=now_s + (lifetime_s or DEFAULT_LIFETIME_S),
        )
        try:
            with self._database.writing() as connection:
                insert_file(connection, tenant, record)
        except BaseException:
            self.storage.remove(file_id)
            raise
        return record

    def find(self, tenant: str, file_id: str, now_s: int) -> FileRecord:
        """A tenant's file.

        Raises:
            ObjectUnknown: there is none, or its time is over.
        """
        with self._database.reading() as connection:
            return find_file(connection, tenant, file_id, now_s)

    def page(
        self, tenant: str, query: PageQuery, purpose: str | None, now_s: int
    ) -> Page[FileRecord]:
        """A part of a tenant's list.

        Raises:
            ObjectUnknown: no file is called `query.after`.
        """
        filters = [FILES.c.tenant == tenant, _is_alive(now_s)]
        if purpose is not None:
            filters.append(FILES.c.purpose == purpose)
        with self._database.reading() as connection:
            rows, has_more = page_rows(connection, FILES, query, filters)
        return Page([FileRecord.of_row(row) for row in rows], has_more)

    def delete(self, tenant: str, file_id: str, now_s: int) -> None:
        """Remove a file for good.

        Raises:
            ObjectUnknown: there is none.
            FileInUse: an unfinished batch reads it.
        """
        with self._database.writing() as connection:
            find_file(connection, tenant, file_id, now_s, locks=True)
            is_reader = (BATCHES.c.input_file_id == file_id) & BATCHES.c.status.in_(UNFINISHED)
            batch_id = connection.scalar(sa.select(BATCHES.c.id).where(is_reader).limit(1))
            if batch_id is not None:
                raise FileInUse(batch_id)
            connection.execute(sa.delete(FILES).where(FILES.c.id == file_id))
        self.storage.remove(file_id)

    def purge_expired(self, now_s: int) -> int:
        """Remove files whose time is over, unless an unfinished batch reads them; how many."""
        in_use = sa.select(BATCHES.c.input_file_id).where(BATCHES.c.status.in_(UNFINISHED))
        is_over = FILES.c.expires_s.is_not(None) & (FILES.c.expires_s <= now_s)
        with self._database.writing() as connection:
            found = sa.select(FILES.c.id).where(is_over, FILES.c.id.not_in(in_use))
            ids = connection.scalars(found.limit(_PURGE_LIMIT)).all()
            connection.execute(sa.delete(FILES).where(FILES.c.id.in_(ids)))
        for file_id in ids:
            self.storage.remove(file_id)
        if ids:
            log.info("files_expired", num_files=len(ids))
        return len(ids)


def insert_file(connection: sa.Connection, tenant: str, record: FileRecord) -> None:
    """Enter a file whose bytes are in the storage."""
    connection.execute(
        sa.insert(FILES).values(
            id=record.id,
            tenant=tenant,
            name_json=json.dumps(record.name),
            purpose=str(record.purpose),
            num_bytes=record.num_bytes,
            created_s=record.created_s,
            expires_s=record.expires_s,
        )
    )


def find_file(
    connection: sa.Connection,
    tenant: str,
    file_id: str,
    now_s: int,
    *,
    param: str | None = None,
    locks: bool = False,
) -> FileRecord:
    """See `FileStore.find`; `param` is the field that named the file.

    `locks`: the file stays as it is until the transaction ends.
    """
    is_it = (FILES.c.id == file_id) & (FILES.c.tenant == tenant) & _is_alive(now_s)
    wanted = sa.select(FILES).where(is_it)
    if locks:
        wanted = wanted.with_for_update()
    row = None if "\0" in file_id else connection.execute(wanted).first()
    if row is None:
        raise ObjectUnknown("file", param)
    return FileRecord.of_row(row)


def page_rows(
    connection: sa.Connection,
    table: sa.Table,
    query: PageQuery,
    filters: list[sa.ColumnElement[bool]],
) -> tuple[list[sa.Row[Any]], bool]:
    """The rows of one page, and whether more follow.

    Raises:
        ObjectUnknown: no row that passes the first filter (the tenant's) is called `query.after`.
    """
    wanted = sa.select(table).where(*filters)
    if query.after is not None:
        is_cursor = (table.c.id == query.after.replace("\0", "")) & filters[0]
        cursor = connection.scalar(sa.select(table.c.number).where(is_cursor))
        if cursor is None:
            raise ObjectUnknown("object", "after")
        wanted = wanted.where(
            table.c.number > cursor if query.ascending else table.c.number < cursor
        )
    order = table.c.number.asc() if query.ascending else table.c.number.desc()
    rows = connection.execute(wanted.order_by(order).limit(query.limit + 1)).all()
    return list(rows[: query.limit]), len(rows) > query.limit


def _is_alive(now_s: int) -> sa.ColumnElement[bool]:
    return FILES.c.expires_s.is_(None) | (FILES.c.expires_s > now_s)
