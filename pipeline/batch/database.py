"""The database of files and batches: SQLite in WAL mode, or any other that SQLAlchemy knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
import structlog
from alembic import command
from alembic.config import Config
from sqlalchemy import event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, InterfaceError, NoSuchModuleError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from pipeline.batch.refusals import DatabaseAway
from pipeline.errors import DatabaseUnusable

log = structlog.get_logger(__name__)

BUSY_LIMIT_S = 30.0
_CONNECT_LIMIT_S = 10  # a whole number, for libpq
_IS_READER = "pointsman_is_reader"
_MIGRATION_LOCK = 7_404_107


class Database:
    """Short transactions from any thread. All methods raise `DatabaseAway` when nobody answers."""

    def __init__(self, url: str) -> None:
        """`url` as SQLAlchemy reads it, e.g. `sqlite:////data/batch.sqlite`, `postgresql+psycopg://...`.

        Raises:
            DatabaseUnusable: it is no such URL, or its driver is not installed.
            OSError: a folder for SQLite cannot be made.
        """
        parsed = _parsed(url)
        self._is_sqlite = parsed.get_backend_name() == "sqlite"
        if self._is_sqlite and parsed.database:
            Path(parsed.database).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._engine = sa.create_engine(
                parsed,
                connect_args=_connect_arguments(parsed),
                pool_pre_ping=not self._is_sqlite,
            )
        except ImportError as error:
            reason = f"the driver of {parsed.drivername} is not installed ({error})"
            raise DatabaseUnusable(reason) from error
        if self._is_sqlite:
            event.listen(self._engine, "connect", _tune)
            event.listen(self._engine, "begin", _begin)
        self._readers = self._engine.execution_options(**{_IS_READER: True})

    def migrate(self) -> None:
        """Bring the tables up to date; safe when several processes start at once."""
        config = Config()
        config.set_main_option("script_location", "pipeline.batch:migrations")
        with self.writing() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """One snapshot."""
        with _database_errors(), self._readers.connect() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """One transaction: all of it is kept on the disk, or nothing."""
        with _database_errors(), self._engine.begin() as connection:
            yield connection

    def close(self) -> None:
        """Let the connections go."""
        self._engine.dispose()


def _parsed(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except (ArgumentError, ValueError) as error:  # its words may show the URL
        reason = "it is no URL, as sqlite:////data/batch.sqlite or postgresql+psycopg://host/name"
        raise DatabaseUnusable(reason) from error
    try:
        parsed.get_dialect()
    except (ArgumentError, NoSuchModuleError) as error:
        raise DatabaseUnusable(f"{parsed.drivername} is no database that is known") from error
    return parsed


def _connect_arguments(url: sa.URL) -> dict[str, object]:
    kind = url.get_backend_name()
    if kind == "sqlite":
        return {"timeout": BUSY_LIMIT_S, "check_same_thread": False}
    is_told = kind != "postgresql" or "connect_timeout" in url.query
    return {} if is_told else {"connect_timeout": _CONNECT_LIMIT_S}


@contextmanager
def _database_errors() -> Iterator[None]:
    """Turn "away, locked, full" into `DatabaseAway`; a broken statement is a bug and passes."""
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeout) as error:
        log.warning("database_unavailable", error=type(error).__name__, cause=str(error.args[0]))
        raise DatabaseAway from error


def _tune(connection: DBAPIConnection, _record: object) -> None:
    # The driver would begin a transaction late, at the first write, and fail when another was faster.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")  # an accepted upload outlives a power cut
    cursor.close()


def _begin(connection: sa.Connection) -> None:
    is_reader = connection.get_execution_options().get(_IS_READER, False)
    connection.exec_driver_sql("BEGIN" if is_reader else "BEGIN IMMEDIATE")
