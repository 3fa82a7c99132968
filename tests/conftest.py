"""Services that tests need are started here, on free ports, and ended with the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from hypothesis import settings

from pipeline.cli.embedded_redis import EmbeddedRedis

# `pytest --hypothesis-profile=long --timeout=0 PATH`: for hours in which nobody waits.
settings.register_profile("long", max_examples=1_000, deadline=None)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A Redis of our own for the whole run."""
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"), persistent=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """Its URL; it is empty at the start of each test."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url
