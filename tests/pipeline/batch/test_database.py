"""The tables, their history, and transactions of several writers."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from pipeline.batch import database as database_module
from pipeline.batch.database import Database
from pipeline.batch.refusals import DatabaseAway
from pipeline.batch.tables import FILES, METADATA
from pipeline.errors import DatabaseUnusable


def test_the_migrations_make_the_tables_that_the_code_uses(shelf: Any) -> None:
    with shelf.database.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []


def test_several_processes_may_migrate_at_once(tmp_path: Path) -> None:
    databases = [Database(f"sqlite:///{tmp_path / 'x.sqlite'}") for _ in range(6)]
    with ThreadPoolExecutor(len(databases)) as pool:
        for done in [pool.submit(database.migrate) for database in databases]:
            done.result()
    with databases[0].reading() as connection:
        assert sa.inspect(connection).has_table("batches")
    for database in databases:
        database.close()


def test_sqlite_keeps_a_write_ahead_log_and_syncs_it(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'x.sqlite'}")
    with database.reading() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    database.close()


def test_a_failed_transaction_leaves_nothing(shelf: Any) -> None:
    row = {"id": "x", "tenant": "t", "name_json": '""', "purpose": "batch"}

    def write_and_fail() -> None:
        with shelf.database.writing() as connection:
            connection.execute(sa.insert(FILES).values(**row, num_bytes=0, created_s=0))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_and_fail()
    with shelf.database.reading() as connection:
        assert connection.execute(sa.select(FILES)).all() == []


def test_sqlite_writers_wait_for_each_other_and_readers_for_nobody(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'x.sqlite'}")
    database.migrate()
    row = {"tenant": "t", "name_json": '""', "purpose": "batch", "num_bytes": 0, "created_s": 0}

    def write(rank: int) -> None:
        with database.writing() as connection:
            count = connection.scalar(sa.select(sa.func.count()).select_from(FILES))
            connection.execute(sa.insert(FILES).values(**row, id=f"{rank}-{count}"))

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(write, rank) for rank in range(40)]:
            done.result()
    with database.writing(), database.reading() as reader:
        ids = reader.scalars(sa.select(FILES.c.id)).all()
    database.close()
    assert sorted(int(text.split("-")[1]) for text in ids) == list(range(40))


def test_a_database_that_cannot_be_opened_is_said_to_be_away(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").mkdir()
    database = Database(f"sqlite:///{tmp_path / 'x.sqlite'}")
    with pytest.raises(DatabaseAway):
        database.migrate()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("no url: secret", "it is no URL"),
        ("postgresql://u:secret@host:port/name", "it is no URL"),
        ("nonsense://u:secret@host/name", "nonsense is no database that is known"),
        ("postgresql+nonsense://u:secret@host/name", r"postgresql\+nonsense is no database"),
        ("mysql+mysqldb://u:secret@host/name", r"driver of mysql\+mysqldb is not installed"),
    ],
)
def test_a_url_that_nobody_can_open_is_refused_without_its_password(url: str, reason: str) -> None:
    with pytest.raises(DatabaseUnusable, match=reason) as caught:
        Database(url)
    assert "secret" not in str(caught.value)


def test_a_server_that_takes_the_connection_and_says_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(database_module, "_CONNECT_LIMIT_S", 2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = Database(f"postgresql+psycopg://u:p@127.0.0.1:{server.getsockname()[1]}/x")
        began_s = time.monotonic()
        with pytest.raises(DatabaseAway):
            silent.migrate()
        assert time.monotonic() - began_s < 8
        silent.close()
