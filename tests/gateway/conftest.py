"""The real app on a Redis that is not there: everything up to the queue, and nothing behind it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gateway.app import create_app
from gateway.settings import GatewaySettings
from pipeline.settings import PipelineSettings

MAX_BODY_BYTES = 4096
NOBODY = "redis://127.0.0.1:1/0"
KEYS = (
    ("t1", "sk-one", ""),
    ("t2", "sk-two", ""),
    ("t1", "sk-narrow", "models=other"),
    ("t1", "sk-plain", "models=org/m:v1,other rights=none"),
    ("ops", "sk-scrape", "rights=metrics"),
)


def made_app(tmp_path: Path, **options: Any) -> Iterator[FastAPI]:
    app = create_app(
        GatewaySettings(max_body_bytes=MAX_BODY_BYTES, drain_s=0.0, **options),
        PipelineSettings(
            engine="digest", model_name="org/m:v1", redis_url=NOBODY, data_dir=tmp_path
        ),
    )
    yield app
    app.state.services.encoding.shutdown()


@pytest.fixture
def app(tmp_path: Path) -> Iterator[FastAPI]:
    yield from made_app(tmp_path)


@pytest.fixture
def keys_path(tmp_path: Path) -> Path:
    lines = ["# tenants", ""]
    lines += [
        f"{tenant} {hashlib.sha256(key.encode()).hexdigest()} {fields}"
        for tenant, key, fields in KEYS
    ]
    path = tmp_path / "keys"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def keyed_app(tmp_path: Path, keys_path: Path) -> Iterator[FastAPI]:
    yield from made_app(tmp_path, keys_file=keys_path)


@pytest.fixture
def shown_app(tmp_path: Path, keys_path: Path) -> Iterator[FastAPI]:
    yield from made_app(tmp_path, keys_file=keys_path, metrics_need_key=False)


@pytest.fixture
def strict_app(tmp_path: Path) -> Iterator[FastAPI]:
    yield from made_app(tmp_path, strict_fields=True)


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client


@pytest.fixture
async def keyed_http(keyed_app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(keyed_app) as client:
        yield client


@pytest.fixture
async def shown_http(shown_app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(shown_app) as client:
        yield client


@pytest.fixture
async def strict_http(strict_app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(strict_app) as client:
        yield client
