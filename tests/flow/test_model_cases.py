"""Several models behind one gateway: each found by its names, none held by another."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.flow.rig import Rig, wait_until
from tests.flow.talk import JobReading, client, complete, submit_job

JAMMED = "org/a:v1"  # not a word that a queue's name may hold as it is
ALIAS = "small"
NUM_PLACES = 4
NUM_MAY_WAIT = 50
A_WORKER = {"POINTSMAN_MODEL_NAME": JAMMED, "POINTSMAN_MODEL_ALIASES": ALIAS}


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Iterator[Rig]:
    """Model `m` with both roles, and another one on the same node that the gateway is not told of."""
    rig = make_rig(
        env={
            "POINTSMAN_WORKER_MAX_BATCH_SEQUENCES": str(NUM_PLACES),
            "POINTSMAN_MAX_WAITING": str(NUM_MAY_WAIT),
        }
    )
    rig.start_worker("a-0", "both", **A_WORKER)
    rig.wait_for_worker("a-0")
    wait_until(lambda: rig.redis.hlen("slots") == 3, 5, "all workers have told their places")
    return rig


async def ids_of(http: httpx.AsyncClient) -> dict[str, str]:
    models = (await http.get("/v1/models")).json()["data"]
    assert all(model["max_model_len"] == 512 for model in models)
    return {model["id"]: model["root"] for model in models}


async def latencies_s(http: httpx.AsyncClient, count: int) -> list[float]:
    """Of one request to `m` after the other; each must be served."""
    times_s = []
    for number in range(count):
        started_s = time.perf_counter()
        await complete(http, f"request {number}", max_tokens=4)
        times_s.append(time.perf_counter() - started_s)
    return times_s


def p95(times_s: list[float]) -> float:
    return statistics.quantiles(times_s, n=20)[-1]


async def test_every_model_that_a_living_worker_announces_is_served_by_all_its_names(
    rig: Rig,
) -> None:
    async with client(rig) as http:
        assert await ids_of(http) == {"m": "m", JAMMED: JAMMED, ALIAS: JAMMED}
        one = await http.get(f"/v1/models/{JAMMED}")
        assert one.json()["id"] == JAMMED
        for name in ("m", JAMMED, ALIAS):
            answer = await complete(http, "one of several", model=name, max_tokens=4)
            assert answer["model"] == name
            assert answer["usage"]["completion_tokens"] == 4
        unknown = await http.post("/v1/completions", json={"model": "nope", "prompt": "x"})
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_request_is_handed_over_within_its_model(rig: Rig) -> None:
    async with client(rig) as http:
        workers = []
        for name in ("m", ALIAS):
            job_id = await submit_job(http, "who computes this", model=name, max_tokens=4)
            await JobReading(job_id).read_through(http)
            job: dict[str, Any] = (await http.get(f"/v1/jobs/{job_id}")).json()
            workers.append((job["model"], job["timing"]["workers"]))
    assert workers == [("m", ["prefill-0@node-a", "decode-0@node-a"]), (JAMMED, ["a-0@node-a"])]


async def test_c162_the_queue_of_one_model_does_not_hold_another(rig: Rig) -> None:
    async with client(rig) as http:
        await latencies_s(http, 10)
        before_s = await latencies_s(http, 40)
        rig.freeze("a-0")
        try:
            jobs = [
                await submit_job(http, f"job {number}", model=JAMMED, max_tokens=4)
                for number in range(NUM_MAY_WAIT)
            ]
            during_s = await latencies_s(http, 40)
            # A's own limit, at the latest when its places have gone with the worker.
            refused = {"model": JAMMED, "prompt": "one more", "max_tokens": 4}
            while (answer := await http.post("/v1/jobs", json=refused)).status_code == 202:
                jobs.append(answer.json()["id"])
            assert (answer.status_code, len(jobs) <= NUM_MAY_WAIT + NUM_PLACES) == (503, True)
            assert answer.json()["error"]["code"] == "overloaded"
            assert rig.metric(f'pointsman_ledger_requests_open{{model="{JAMMED}"}}') == len(jobs)
            assert rig.metric('pointsman_ledger_requests_open{model="m"}') == 0
            during_s += await latencies_s(http, 40)
        finally:
            rig.thaw("a-0")
        # Held by A, a request of B would wait for the end of its jam.
        assert p95(during_s) <= 3 * p95(before_s) + 0.25, (p95(before_s), p95(during_s))
        readings = [JobReading(job_id) for job_id in jobs]
        await asyncio.gather(*(reading.read_through(http) for reading in readings))
        assert [reading.error for reading in readings] == [None] * len(jobs)
    rig.wait_at_rest()


async def test_a_model_whose_worker_is_gone_waits_for_the_next_one(rig: Rig) -> None:
    rig.kill("a-0")
    async with client(rig) as http:
        waiting = asyncio.create_task(complete(http, "waits", model=ALIAS, max_tokens=4))
        await complete(http, "does not", max_tokens=4)
        assert not waiting.done()
        rig.start_worker("a-0", "both", **A_WORKER)
        assert (await waiting)["usage"]["completion_tokens"] == 4
