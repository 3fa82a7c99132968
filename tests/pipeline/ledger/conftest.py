"""A ledger on a real Redis, from both sides."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import redis

from pipeline.ledger.admission import AdmissionLimits
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.store import connect, connect_async
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.protocol.request import Request
from pipeline.protocol.sampling import SamplingParams


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """Raw access, to look behind the ledger."""
    connection = connect(redis_url)
    yield connection
    connection.close()


@pytest.fixture
def worker_ledger(client: redis.Redis) -> WorkerLedger:
    """The worker's side; two lost attempts are one too many."""
    return WorkerLedger(client, max_attempts=2, retention_s=60)


@pytest.fixture
async def client_ledger(redis_url: str) -> AsyncIterator[ClientLedger]:
    """The gateway's side; three may wait."""
    connection = connect_async(redis_url)
    yield ClientLedger(connection, limits=AdmissionLimits(max_waiting=3), retention_s=60)
    await connection.aclose()


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """Builds small requests."""

    def make(request_id: str = "r1", **fields: object) -> Request:
        values: dict[str, object] = {
            "model": "m",
            "prompt_tokens": [1, 2, 3],
            "sampling": SamplingParams(max_tokens=8),
            "tenant": "t1",
            "tenant_salt": "salt",
        }
        return Request(request_id=request_id, **(values | fields))  # type: ignore[arg-type]

    return make
