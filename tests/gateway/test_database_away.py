"""A gateway whose database is away serves everything else, and files and batches when it comes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI

from gateway import batch_desk
from pipeline.batch.database import Database
from tests.gateway.conftest import client_of, made_app

UPLOAD = {"files": {"file": ("in.jsonl", b"x")}, "data": {"purpose": "batch"}}


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A folder where the database would lie: SQLite cannot open that."""
    path = tmp_path / "batches" / "batches.sqlite"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def app(tmp_path: Path, blocked: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FastAPI]:
    monkeypatch.setattr(batch_desk, "_OPEN_AGAIN_S", 0.02)
    yield from made_app(tmp_path)


async def test_it_starts_without_its_database_and_opens_it_later(
    app: FastAPI, blocked: Path
) -> None:
    async with app.router.lifespan_context(app), client_of(app) as http:
        for _ in range(3):
            refused = await http.post("/v1/files", **UPLOAD)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "store_unavailable"
            assert int(refused.headers["retry-after"]) > 0
        assert (await http.get("/livez")).status_code == 200
        await asyncio.to_thread(blocked.rmdir)
        stored = refused
        async with asyncio.timeout(10):
            while stored.status_code == 503:
                await asyncio.sleep(0.02)
                stored = await http.post("/v1/files", **UPLOAD)

        assert stored.status_code == 200
        assert (await http.get("/v1/batches")).json()["data"] == []


async def test_it_ends_while_its_database_is_away(app: FastAPI) -> None:
    async with asyncio.timeout(10), app.router.lifespan_context(app):
        await asyncio.sleep(0.1)


async def test_a_database_that_never_answers_does_not_hold_up_the_start(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(batch_desk, "_OPEN_WAIT_S", 0.05)
    monkeypatch.setattr(Database, "migrate", lambda _: answers.wait(10))

    async with asyncio.timeout(5), app.router.lifespan_context(app), client_of(app) as http:
        assert (await http.get("/v1/files")).status_code == 503
        answers.set()


async def test_tables_that_cannot_be_made_end_the_start(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Database) -> None:
        raise ValueError("no such revision")

    monkeypatch.setattr(Database, "migrate", fail)

    with pytest.raises(ValueError, match="no such revision"):
        async with app.router.lifespan_context(app):
            pass
