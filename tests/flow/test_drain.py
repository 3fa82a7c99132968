"""`pointsman drain`: what runs on a node goes on elsewhere, and its workers end in order."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable

import pytest

from pipeline.cli.status import read_status
from tests.flow.rig import REPOSITORY, Rig, wait_until
from tests.flow.talk import JobReading, client, submit_job, text_of

NUM_STREAMS = 8
MAX_TOKENS = 150


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    workers = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    return make_rig(workers=workers, env={"POINTSMAN_WORKER_STEP_DELAY_MS": "20"})


def prompt(number: int) -> str:
    return f"stream {number} moves house " + "with all it has " * (1 + 2 * number)


def command(rig: Rig, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cli.main", *words],
        env=rig.environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def num_owned(rig: Rig, node: str) -> int:
    return sum(rig.redis.scard(key) for key in rig.redis.scan_iter(f"running:*@{node}#*"))


def test_the_last_node_that_decodes_is_not_drained_without_force(rig: Rig) -> None:
    refused = command(rig, "drain", "node-a")

    assert refused.returncode == 1
    assert "--force" in refused.stderr
    assert not rig.redis.exists("drains")
    assert rig.processes["decode-0"].poll() is None


def test_an_unknown_node_is_named_with_the_known_ones(rig: Rig) -> None:
    refused = command(rig, "drain", "node-x")

    assert refused.returncode == 1
    assert "node-x" in refused.stderr
    assert "node-a" in refused.stderr


async def test_streams_of_a_drained_node_go_on_elsewhere_and_equal(rig: Rig) -> None:
    here = tuple(rig.processes[name] for name in ("prefill-0", "decode-0", "decode-1"))
    async with client(rig) as http:
        expected = list(
            await asyncio.gather(
                *(text_of(http, prompt(n), max_tokens=MAX_TOKENS) for n in range(NUM_STREAMS))
            )
        )
        jobs = [
            JobReading(await submit_job(http, prompt(n), max_tokens=MAX_TOKENS))
            for n in range(NUM_STREAMS)
        ]
        reading = [asyncio.create_task(job.read_through(http, 60)) for job in jobs]
        await asyncio.gather(*(job.has_events(3) for job in jobs))
        assert num_owned(rig, "node-a") == NUM_STREAMS
        rig.start_worker("both-b", "both", POINTSMAN_NODE="node-b")
        rig.wait_for_worker("both-b")

        drained = await asyncio.to_thread(command, rig, "drain", "node-a")
        assert drained.returncode == 0, drained.stderr
        assert "node-a is drained: 3 workers left" in drained.stdout
        await asyncio.gather(*reading)

        assert [job.text for job in jobs] == expected
        assert all(job.error is None for job in jobs)
        for job in jobs:
            assert int(rig.request_fields(job.job_id)["losses"]) == 0
        assert [process.wait(20) for process in here] == [0, 0, 0]
        assert not rig.redis.exists("drains"), "an order ends with its worker"
        assert all(b"worker_lost" not in fault for fault in rig.redis.lrange("faults", 0, -1))
        assert await text_of(http, prompt(0), max_tokens=MAX_TOKENS) == expected[0]
    await asyncio.to_thread(rig.wait_at_rest)


async def test_a_node_that_drains_is_shown_so_while_its_streams_end(
    make_rig: Callable[..., Rig],
) -> None:
    env = {"POINTSMAN_WORKER_STEP_DELAY_MS": "20"}
    rig = make_rig(workers={"both-a": "both"}, env=env)
    async with client(rig) as http:
        job = JobReading(await submit_job(http, "ends where it is", max_tokens=400))
        reading = asyncio.create_task(job.read_through(http, 60))
        await job.has_events(3)
        rig.start_worker("both-b", "both", POINTSMAN_NODE="node-b")
        rig.wait_for_worker("both-b")
        draining = asyncio.create_task(
            asyncio.to_thread(command, rig, "drain", "node-a", "--limit-s", "60")
        )

        def healths() -> list[str]:
            return [line.health for line in read_status(rig.redis_server.url).workers]

        await asyncio.to_thread(wait_until, lambda: healths() == ["draining", "ok"], 30)
        elsewhere = await text_of(http, "goes elsewhere", max_tokens=3)
        await reading
        drained = await draining

        assert elsewhere
        assert job.end is not None
        assert drained.returncode == 0, drained.stderr
        assert rig.request_fields(job.job_id)["node"].startswith("both-a@node-a")
        assert rig.request_fields(job.job_id)["attempt"] == "1"
    assert rig.processes["both-a"].wait(20) == 0
