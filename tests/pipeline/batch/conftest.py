"""The real stores on a fresh folder and database: one suite for SQLite and PostgreSQL."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from pipeline.batch.batch_store import BatchOrder, BatchStore
from pipeline.batch.database import Database
from pipeline.batch.file_storage import FileStorage
from pipeline.batch.file_store import FileStore
from pipeline.batch.line_store import LineStore
from pipeline.batch.records import BatchRecord
from pipeline.batch.validation import Validator

ENDPOINT = "/v1/completions"
NOW_S = 1_000_000
DEADLINE_S = 86_400.0


@dataclass
class Shelf:
    """All stores of one database."""

    database: Database
    storage: FileStorage
    files: FileStore
    batches: BatchStore
    lines: LineStore

    def order(self, data: bytes, tenant: str = "t1") -> BatchRecord:
        """A new batch with this input."""
        file = self.files.create(tenant, "in.jsonl", io.BytesIO(data), None, NOW_S)
        return self.batches.create(tenant, BatchOrder(file.id, ENDPOINT), NOW_S)

    def accepted(self, data: bytes, tenant: str = "t1") -> BatchRecord:
        """A batch in progress."""
        batch = self.order(data, tenant)
        verdict = Validator(self.lines, self.storage).run(batch, lambda: True)
        assert verdict is not None
        assert not verdict.errors
        assert self.batches.accept(batch.number, verdict.num_lines, verdict.model, NOW_S)
        return self.batches.load(batch.number)


def input_line(custom_id: Any, **body: Any) -> bytes:
    """One line of an input file, without its end."""
    entry = {
        "custom_id": custom_id,
        "method": "POST",
        "url": ENDPOINT,
        "body": {"model": "m", "prompt": "x", **body},
    }
    return json.dumps(entry).encode()


def input_file(num_lines: int) -> bytes:
    """Lines r0, r1, ..."""
    return b"\n".join(input_line(f"r{number}") for number in range(num_lines))


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL of our own, if the machine has one."""
    binary = shutil.which("postgres")
    if binary is None:
        pytest.skip("no PostgreSQL server on this machine")
    user = "nobody" if os.geteuid() == 0 else None  # it does not run as root
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as folder:
        if user is not None:
            shutil.chown(folder, user)
        options: dict[str, Any] = {"user": user, "cwd": folder, "stdout": subprocess.DEVNULL}
        initdb = [str(shutil.which("initdb")), "-D", f"{folder}/db", "-U", "t", "-A", "trust", "-N"]
        subprocess.run(initdb, check=True, **options)
        command = [binary, "-D", f"{folder}/db", "-k", folder, "-c", "listen_addresses="]
        server = subprocess.Popen([*command, "-F"], stderr=subprocess.DEVNULL, **options)
        url = f"postgresql+psycopg://t@/postgres?host={folder}"
        try:
            wait_for_postgres(url)
            yield url
        finally:
            server.terminate()
            server.wait()


def wait_for_postgres(url: str, limit_s: float = 20.0) -> None:
    engine = sa.create_engine(url)
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            engine.connect().close()
        except sa.exc.OperationalError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
        else:
            engine.dispose()
            return


def empty_database(url: str) -> None:
    """Drop all that an earlier test has made."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    engine.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shelf]:
    url = f"sqlite:///{tmp_path / 'db' / 'batches.sqlite'}"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres_url")
        empty_database(url)
    database = Database(url)
    database.migrate()
    storage = FileStorage((tmp_path / "files").as_uri())
    yield Shelf(
        database,
        storage,
        FileStore(database, storage),
        BatchStore(database, deadline_s=DEADLINE_S),
        LineStore(database),
    )
    database.close()


@pytest.fixture
def make_input_line() -> Callable[..., bytes]:
    return input_line


@pytest.fixture
def make_input() -> Callable[[int], bytes]:
    return input_file
