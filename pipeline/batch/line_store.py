"""The lines of batches in the database, and their results: at most one per line, whoever writes it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from pipeline.batch.database import Database
from pipeline.batch.records import ENDED, UNFINISHED, BatchStatus
from pipeline.batch.tables import BATCHES, LINES, RESULTS
from pipeline.protocol.stream import RequestUsage

_READ_LIMIT = 500
_PURGE_LIMIT = 2_000
_OPEN = (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)
_NO_USAGE = RequestUsage(0, 0, 0)


@dataclass(frozen=True, slots=True)
class LinePlace:
    """One request of an input file: line number (from 1, blank lines count) and where it lies."""

    line: int
    custom_id: str
    start_byte: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LineResult:
    """The answer to one line. `output` is the line of the output or error file, without its end."""

    batch: int
    line: int
    is_success: bool
    output: bytes
    usage: RequestUsage = field(default=_NO_USAGE)


@dataclass(frozen=True, slots=True)
class EndedLine:
    """A line with its result; None when it was never answered."""

    line: int
    custom_id: str
    is_success: bool
    output: bytes | None


class LineStore:
    """Synchronous, for any thread. `batch` is a batch's number."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_lines(self, batch: int, lines: Sequence[LinePlace]) -> None:
        """Enter lines of a batch that is being validated."""
        rows = [
            {
                "batch": batch,
                "line": line.line,
                "custom_id_json": json.dumps(line.custom_id),
                "start_byte": line.start_byte,
                "num_bytes": line.num_bytes,
            }
            for line in lines
        ]
        with self._database.writing() as connection:
            if _lock_those({batch}, (BatchStatus.VALIDATING,), connection):
                connection.execute(sa.insert(LINES), rows)

    def clear(self, batch: int, statuses: Sequence[BatchStatus]) -> None:
        """Forget all lines and results of a batch, in small steps, while it has such a status."""
        for table in (RESULTS, LINES):
            while self._delete_some(table, batch, statuses):
                pass

    def pending(self, batch: int, *, after_line: int, limit: int) -> list[LinePlace]:
        """The next lines behind `after_line` that have no result, in the file's order."""
        has_result = sa.exists().where(
            RESULTS.c.batch == LINES.c.batch, RESULTS.c.line == LINES.c.line
        )
        wanted = sa.select(LINES).where(
            LINES.c.batch == batch, LINES.c.line > after_line, ~has_result
        )
        with self._database.reading() as connection:
            rows = connection.execute(wanted.order_by(LINES.c.line).limit(limit)).all()
        return [
            LinePlace(row.line, json.loads(row.custom_id_json), row.start_byte, row.num_bytes)
            for row in rows
        ]

    def add_results(self, results: Sequence[LineResult]) -> int:
        """Keep results and count them, in one transaction; one that is there already stays.

        A batch that is over takes no more: its files are written. Returns how many were new.
        """
        rows = [
            {
                "batch": result.batch,
                "line": result.line,
                "is_success": result.is_success,
                "output": result.output,
            }
            for result in results
        ]
        with self._database.writing() as connection:
            open_batches = _lock_those({item.batch for item in results}, _OPEN, connection)
            rows = [row for row in rows if row["batch"] in open_batches]
            if not rows:
                return 0
            is_sqlite = connection.dialect.name == "sqlite"
            insert = (sqlite.insert if is_sqlite else postgresql.insert)(RESULTS)
            keep = insert.on_conflict_do_nothing().returning(RESULTS.c.batch, RESULTS.c.line)
            added = {tuple(row) for row in connection.execute(keep, rows)}
            _count(connection, [item for item in results if (item.batch, item.line) in added])
        return len(added)

    def ended(self, batch: int) -> Iterator[EndedLine]:
        """All lines with what became of them, in the file's order and in flat memory."""
        is_its = (RESULTS.c.batch == LINES.c.batch) & (RESULTS.c.line == LINES.c.line)
        wanted = (
            sa.select(LINES.c.line, LINES.c.custom_id_json, RESULTS.c.is_success, RESULTS.c.output)
            .select_from(LINES.outerjoin(RESULTS, is_its))
            .where(LINES.c.batch == batch)
            .order_by(LINES.c.line)
            .limit(_READ_LIMIT)
        )
        last_line = 0
        while True:
            with self._database.reading() as connection:
                rows = connection.execute(wanted.where(LINES.c.line > last_line)).all()
            for row in rows:
                custom_id = json.loads(row.custom_id_json)
                yield EndedLine(row.line, custom_id, bool(row.is_success), row.output)
            if len(rows) < _READ_LIMIT:
                return
            last_line = rows[-1].line

    def purge_ended(self) -> None:
        """Forget the rows of batches that are over; their files hold everything."""
        is_over = BATCHES.c.has_rows & BATCHES.c.status.not_in([str(item) for item in UNFINISHED])
        with self._database.reading() as connection:
            numbers = connection.scalars(sa.select(BATCHES.c.number).where(is_over)).all()
        for number in numbers:
            self.clear(number, ENDED)
            with self._database.writing() as connection:
                connection.execute(
                    sa.update(BATCHES).where(BATCHES.c.number == number).values(has_rows=False)
                )

    def _delete_some(self, table: sa.Table, batch: int, statuses: Sequence[BatchStatus]) -> bool:
        some = sa.select(table.c.line).where(table.c.batch == batch).limit(_PURGE_LIMIT)
        with self._database.writing() as connection:
            if not _lock_those({batch}, statuses, connection):
                return False
            lines = sa.delete(table).where(table.c.batch == batch, table.c.line.in_(some))
            return bool(connection.execute(lines).rowcount)


def _lock_those(
    batches: set[int], statuses: Sequence[BatchStatus], connection: sa.Connection
) -> set[int]:
    """Those that have such a status; they keep it until the transaction ends."""
    is_such = BATCHES.c.status.in_([str(status) for status in statuses])
    found = sa.select(BATCHES.c.number).where(BATCHES.c.number.in_(batches), is_such)
    return set(connection.scalars(found.with_for_update()))


def _count(connection: sa.Connection, results: Sequence[LineResult]) -> None:
    by_batch: dict[int, list[LineResult]] = defaultdict(list)
    for result in results:
        by_batch[result.batch].append(result)
    columns = BATCHES.c
    for number, mine in by_batch.items():
        num_completed = sum(result.is_success for result in mine)
        connection.execute(
            sa.update(BATCHES)
            .where(columns.number == number)
            .values(
                num_completed=columns.num_completed + num_completed,
                num_failed=columns.num_failed + len(mine) - num_completed,
                input_tokens=columns.input_tokens + sum(r.usage.prompt_tokens for r in mine),
                cached_tokens=columns.cached_tokens + sum(r.usage.cached_tokens for r in mine),
                output_tokens=columns.output_tokens + sum(r.usage.completion_tokens for r in mine),
            )
        )
