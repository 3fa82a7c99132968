"""Redis answers and takes no writes; workers and gateways live through it without being restarted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
import pytest

from tests.flow.rig import Rig
from tests.flow.talk import JobReading, body, client, submit_job, text_of

REFUSING_S = 3.0
NUM_STREAMS = 6


@dataclass(frozen=True)
class Refusal:
    """The commands after which Redis refuses writes, and takes them again."""

    name: str
    begin: Sequence[str]
    end: Sequence[str]


REFUSALS = [
    Refusal(
        "without replicas",
        ("CONFIG", "SET", "min-replicas-to-write", "1"),
        ("CONFIG", "SET", "min-replicas-to-write", "0"),
    ),
    Refusal("read-only", ("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
    Refusal("full", ("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
]


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(env={"POINTSMAN_WORKER_STEP_DELAY_MS": "20"})


async def refused(http: httpx.AsyncClient) -> list[httpx.Response]:
    """The answers to new requests while writes are refused, as many as fit in the time."""
    answers = []
    try:
        async with asyncio.timeout(REFUSING_S):
            while True:
                answers.append(await http.post("/v1/completions", json=body("now?", max_tokens=2)))
                await asyncio.sleep(0.1)
    except TimeoutError:
        return answers


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
async def test_a_store_that_takes_no_writes_for_a_while_costs_a_pause(
    rig: Rig, refusal: Refusal
) -> None:
    processes = dict(rig.processes)
    async with client(rig) as http:
        prompts = [f"{refusal.name}, stream {n}" for n in range(NUM_STREAMS)]
        expected = list(
            await asyncio.gather(*(text_of(http, prompt, max_tokens=120) for prompt in prompts))
        )
        jobs = [JobReading(await submit_job(http, prompt, max_tokens=120)) for prompt in prompts]
        reading = [asyncio.create_task(job.read_through(http, 60)) for job in jobs]
        await asyncio.gather(*(job.has_events(3) for job in jobs))
        rig.redis.execute_command(*refusal.begin)
        try:
            answers = await refused(http)
        finally:
            rig.redis.execute_command(*refusal.end)
        await asyncio.gather(*reading)

        assert [job.text for job in jobs] == expected
        assert all(job.error is None for job in jobs)
        assert {answer.status_code for answer in answers} == {503}
        assert all(1 <= int(answer.headers["Retry-After"]) <= 60 for answer in answers)
        assert await text_of(http, prompts[0], max_tokens=120) == expected[0]
    rig.wait_at_rest()
    assert all(process.poll() is None for process in processes.values())
