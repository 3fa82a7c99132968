"""The pipeline's own share of the time to the first token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest

from tests.flow.rig import Rig
from tests.flow.talk import body, client, events


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


async def test_the_first_token_comes_within_15_ms_of_the_post(rig: Rig) -> None:
    """Digest engine, one request at a time: HTTP, ledger, Celery, engine, publish, SSE."""
    times_s = []
    async with client(rig) as http:
        for number in range(120):
            request = body(f"request number {number}", max_tokens=8, stream=True)
            started_s = time.perf_counter()
            async with http.stream("POST", "/v1/completions", json=request) as answer:
                waited_s = None
                async for _ in events(answer):
                    waited_s = waited_s or time.perf_counter() - started_s
            times_s.append(waited_s or 0.0)

    assert statistics.median(times_s[20:]) < 0.015
