"""Redis restarts, is lossy, or has other clocks around it; connections to it stay few."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.flow.rig import REPOSITORY, Rig, wait_until
from tests.flow.talk import JobReading, Transcript, client, complete, stream, submit_job, text_of

STEP_MS = {"POINTSMAN_WORKER_STEP_DELAY_MS": "20"}
FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(env=STEP_MS)


async def test_c139_an_idle_pipeline_serves_again_within_ten_seconds(rig: Rig) -> None:
    async with client(rig) as http:
        before = await text_of(http, "over a restart", max_tokens=8)
        await asyncio.to_thread(rig.redis_server.restart)
        restarted_s = time.monotonic()
        assert await text_of(http, "over a restart", max_tokens=8) == before
        assert time.monotonic() - restarted_s < 10


async def queued_and_streaming(rig: Rig, http: httpx.AsyncClient) -> list[JobReading]:
    """Five jobs that stream, then five that wait behind a frozen prefill worker."""
    jobs = [JobReading(await submit_job(http, f"streams {n}", max_tokens=120)) for n in range(5)]
    for job in jobs:
        asyncio.create_task(job.read_through(http, 60))  # noqa: RUF006 - awaited by its events
    await asyncio.gather(*(job.has_events(3) for job in jobs))
    rig.freeze("prefill-0")
    jobs += [JobReading(await submit_job(http, f"waits {n}", max_tokens=10)) for n in range(5)]
    return jobs


async def finish(jobs: list[JobReading], http: httpx.AsyncClient) -> None:
    """Read what is not read yet."""
    await asyncio.gather(*(job.read_through(http, 60) for job in jobs[5:]))
    done = lambda: all(job.end or job.error for job in jobs)  # noqa: E731
    await asyncio.to_thread(wait_until, done, 60)


@pytest.mark.parametrize("num_restarts", [1, 5])
async def test_c139_with_a_log_queued_and_streaming_work_survives(
    rig: Rig, num_restarts: int
) -> None:
    async with client(rig) as http:
        expected = [await text_of(http, f"streams {n}", max_tokens=120) for n in range(5)]
        expected += [await text_of(http, f"waits {n}", max_tokens=10) for n in range(5)]
        jobs = await queued_and_streaming(rig, http)
        for _ in range(num_restarts):
            await asyncio.to_thread(rig.redis_server.restart)
            await asyncio.sleep(2 if num_restarts > 1 else 0)
        rig.thaw("prefill-0")
        await finish(jobs, http)

        assert [job.text for job in jobs] == expected
        assert all(job.error is None for job in jobs)
        assert await text_of(http, "afterwards", max_tokens=3)
    rig.wait_at_rest()


async def test_c139_without_a_log_every_client_gets_an_answer(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(env=STEP_MS | {"POINTSMAN_QUEUE_DEADLINE_S": "10"}, persistent=False)
    transcripts = [Transcript() for _ in range(5)]
    async with client(rig) as http:
        streams = [
            asyncio.create_task(stream(http, f"streams {n}", transcript, max_tokens=120))
            for n, transcript in enumerate(transcripts)
        ]
        await asyncio.gather(*(transcript.has_chunks(3) for transcript in transcripts))
        rig.freeze("prefill-0")
        waiting = [
            asyncio.create_task(
                http.post("/v1/completions", json={"model": "m", "prompt": f"waits {n}"})
            )
            for n in range(5)
        ]
        await asyncio.to_thread(wait_until, lambda: rig.redis.zcard("deadlines") == 10)
        await asyncio.to_thread(rig.redis_server.restart)
        rig.thaw("prefill-0")
        started_s = time.monotonic()
        await asyncio.wait_for(asyncio.gather(*streams), 30)
        answers = await asyncio.wait_for(asyncio.gather(*waiting), 30)
        answered_s = time.monotonic() - started_s

        assert all(t.is_done and (t.error or t.finish_reason == "length") for t in transcripts)
        assert all(a.status_code == 200 or "error" in a.json() for a in answers)
        assert answered_s < 20
        assert await text_of(http, "afterwards", max_tokens=3)
    await asyncio.to_thread(rig.wait_at_rest, 15)


@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed")
@pytest.mark.parametrize("offset", ["+1h", "-1h"])
async def test_c145_a_worker_with_a_wrong_clock_serves_as_any_other(
    make_rig: Callable[..., Rig], offset: str
) -> None:
    rig = make_rig(workers={"prefill-0": "prefill"}, env=STEP_MS)
    rig.start_worker(
        "decode-0",
        "decode",
        LD_PRELOAD=str(FAKETIME),
        FAKETIME=offset,
        FAKETIME_DONT_FAKE_MONOTONIC="1",
        # libfaketime 0.9.10 breaks the sleep of the delay: EINVAL from clock_nanosleep.
        POINTSMAN_WORKER_STEP_DELAY_MS="0",
    )
    rig.wait_for_worker("decode-0")
    rig.wait_ready()
    assert not rig.log("decode-0").startswith(time.strftime("%Y-%m-%dT%H"))
    async with client(rig) as http:
        answers = await asyncio.gather(
            *(complete(http, f"clock {n}", max_tokens=40) for n in range(4))
        )
        job_id = await submit_job(http, "a job", max_tokens=4)
        job = JobReading(job_id)
        await job.read_through(http)
        described = (await http.get(f"/v1/jobs/{job_id}")).json()

    assert {answer["usage"]["completion_tokens"] for answer in answers} == {40}
    assert abs(described["created"] - time.time()) < 60
    fields = rig.request_fields(job_id)
    assert int(fields["created_ms"]) <= int(fields["started_ms"]) <= int(fields["ended_ms"])
    assert int(fields["ended_ms"]) <= (time.time() + 1) * 1000
    assert fields["attempt"] == "1"
    rig.wait_at_rest()


async def test_c147_connections_to_redis_do_not_grow_with_streams(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(env={"POINTSMAN_WORKER_STEP_DELAY_MS": "20"})
    lucky = random.Random(147)  # noqa: S311 - to be repeatable

    def num_connections() -> int:
        return len(rig.redis.client_list())

    async with client(rig) as http:
        await complete(http, "warm", max_tokens=2)
        baseline = num_connections()
        highest = baseline
        left = 1000

        async def disconnects() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                transcript = Transcript()
                reading = asyncio.create_task(
                    stream(http, f"leaves {left}", transcript, max_tokens=200)
                )
                await asyncio.sleep(lucky.random() * 0.5)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

        async def watch() -> None:
            nonlocal highest
            while left > 0:
                highest = max(highest, num_connections())
                await asyncio.sleep(0.2)

        await asyncio.gather(watch(), *(disconnects() for _ in range(200)))
        assert await text_of(http, "afterwards", max_tokens=3)
    await asyncio.to_thread(rig.wait_at_rest, 20)

    # What grows are the pools (16 of the gateway, those of the threads that claim and send), to their limits.
    assert highest <= baseline + 50
    assert num_connections() <= baseline + 50
    assert "Too many connections" not in rig.log("gateway")


@pytest.mark.parametrize("module", ["gateway", "workers"])
def test_a_redis_that_may_evict_is_refused_at_the_start(rig: Rig, module: str) -> None:
    rig.redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        ended = subprocess.run(
            [sys.executable, "-m", module],
            env=rig.environment(POINTSMAN_GATEWAY_PORT="0", POINTSMAN_WORKER_NAME="refused"),
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        rig.redis.config_set("maxmemory-policy", "noeviction")

    said = ended.stdout + ended.stderr
    assert ended.returncode == 2
    assert "allkeys-lru" in said
    assert "noeviction" in said
    assert "Traceback" not in said


def command(rig: Rig, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cli.main", *words],
        env=rig.environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


async def test_status_and_dead_letters_on_the_command_line(make_rig: Callable[..., Rig]) -> None:
    rig: Any = make_rig(workers={"both-0": "both"}, env=STEP_MS | {"POINTSMAN_MAX_ATTEMPTS": "1"})
    async with client(rig) as http:
        expected = await text_of(http, "dies once", max_tokens=60)
        job = JobReading(await submit_job(http, "dies once", max_tokens=60))
        reading = asyncio.create_task(job.read_through(http))
        await job.has_events(3)
        rig.kill("both-0")
        await reading
        assert job.error is not None
        rig.start_worker("both-0", "both")
        rig.wait_for_worker("both-0")

        shown = await asyncio.to_thread(command, rig, "status")
        assert shown.returncode == 0, shown.stderr
        for text in ("both-0@node-a", "dead letters 1", "worker_lost", "killed_by_request"):
            assert text in shown.stdout
        assert "\x1b" not in shown.stdout
        listed = await asyncio.to_thread(command, rig, "dlq", "ls")
        assert job.job_id in listed.stdout
        described = await asyncio.to_thread(command, rig, "dlq", "show", job.job_id)
        assert "both-0@node-a" in described.stdout
        assert "dies once" not in described.stdout
        retried = await asyncio.to_thread(command, rig, "dlq", "retry", job.job_id)
        assert retried.returncode == 0, retried.stderr
        again = JobReading(job.job_id)
        await again.read_through(http)
        assert again.text == expected
        gone = await asyncio.to_thread(command, rig, "dlq", "drop", job.job_id)
        assert gone.returncode == 1
        assert "no dead letter" in gone.stderr
