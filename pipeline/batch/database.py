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
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from pipeline.batch.refusals import DatabaseAway

log = structlog.get_logger(__name__)

BUSY_LIMIT_S = 30.0
_IS_READER = "pointsman_is_reader"
_MIGRATION_LOCK = 7_404_107


class Database:
    """Short transactions from any thread. All methods raise `DatabaseAway` when nobody answers."""

    def __init__(self, url: str) -> None:
        """`url` as SQLAlchemy reads it, e.g. `sqlite:////data/batch.sqlite`, `postgresql+psycopg://...`."""
        parsed = sa.make_url(url)
        self._is_sqlite = parsed.get_backend_name() == "sqlite"
        if self._is_sqlite and parsed.database:
            Path(parsed.database).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        arguments = {"timeout": BUSY_LIMIT_S, "check_same_thread": False}
        self._engine = sa.create_engine(
            parsed,
            connect_args=arguments if self._is_sqlite else {},
            pool_pre_ping=not self._is_sqlite,
        )
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
