"""C135 and C151: what the broker delivers again runs once, and Flower shows what became of each task."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from pipeline.cli.embedded_redis import free_port
from pipeline.cli.flower import flower_command
from pipeline.ledger.messages import broker_lists
from pipeline.settings import PipelineSettings
from pipeline.tasks.app import make_app, transport_options
from pipeline.tasks.publisher import Publisher
from tests.flow.rig import REPOSITORY, Rig, wait_until
from tests.flow.talk import JobReading, client, complete, submit_job, text_of
from tests.flow.wire import num_tokens_run

AUTH = ("watch", "word")
QUEUE = "decode.m.node-a"


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    workers = {"decode-0": "decode", "decode-1": "decode"}
    return make_rig(workers=workers, env={"POINTSMAN_WORKER_STEP_DELAY_MS": "20"})


def num_messages(rig: Rig) -> int:
    """Messages of the decode queue in the broker."""
    return sum(rig.redis.llen(name) for name in broker_lists(QUEUE))


def num_unacked(rig: Rig) -> int:
    """Messages that a worker has taken and not acknowledged."""
    return sum(rig.redis.hlen(key) for key in rig.redis.scan_iter("unacked.*"))


async def test_c135_a_message_that_comes_again_while_its_task_runs_is_dropped(rig: Rig) -> None:
    # Redelivery by time-out cannot happen: what runs is acknowledged, and the time-out outlasts it.
    assert transport_options()["visibility_timeout"] > PipelineSettings().batch_deadline_s
    async with client(rig) as http:
        expected = await text_of(http, "a long task", max_tokens=300)
        before = await asyncio.to_thread(num_tokens_run, rig)
        job = JobReading(await submit_job(http, "a long task", max_tokens=300))
        reading = asyncio.create_task(job.read_through(http, 60))
        await job.has_events(3)
        await asyncio.to_thread(wait_until, lambda: num_unacked(rig) == 0, 10, "acknowledged")
        # Should the broker deliver it again all the same, as after a restore: both workers get it.
        with make_app(rig.redis_server.url) as app:
            for _ in range(10):
                Publisher(app).publish(job.job_id, QUEUE, 3)
        await asyncio.to_thread(wait_until, lambda: num_messages(rig) == 0, 10, "all are taken")
        await reading

        assert job.text == expected, "each token once"
        assert job.error is None
        fields = rig.request_fields(job.job_id)
        assert (fields["attempt"], fields["losses"]) == ("1", "0")
        ran = await asyncio.to_thread(num_tokens_run, rig) - before
    assert ran <= len("a long task") + 1 + 300, "one execution"
    rig.wait_at_rest()


@pytest.fixture(scope="module")
def flower(rig: Rig) -> str:
    return start_flower(rig)


def start_flower(rig: Rig) -> str:
    """Start Flower as `pointsman flower` does; its address."""
    port = free_port()
    with (rig.folder / "flower.log").open("ab") as log:
        rig.processes["flower"] = subprocess.Popen(
            flower_command("127.0.0.1", port, None),
            env=rig.environment(FLOWER_BASIC_AUTH=":".join(AUTH)),
            cwd=REPOSITORY,
            stdout=log,
            stderr=log,
            process_group=0,
        )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/healthcheck", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(answers, 30, "flower")
    return url


def tasks_of(flower: str) -> dict[str, Any]:
    """All that Flower knows, by their ids."""
    tasks: dict[str, Any] = httpx.get(f"{flower}/api/tasks", auth=AUTH, timeout=5).json()
    return tasks


def states_of(flower: str, request_id: str) -> list[str]:
    """What Flower shows of a request's tasks."""
    tasks = tasks_of(flower).items()
    return sorted(task["state"] for name, task in tasks if name.startswith(request_id))


def workers_of(flower: str) -> dict[str, bool]:
    """Workers and whether Flower takes them to be alive; those it has purged are missing."""
    shown = httpx.get(f"{flower}/api/workers?status=1", auth=AUTH, timeout=5).json()
    return {str(name): bool(is_alive) for name, is_alive in shown.items()}


def knows_beat(flower: str, process: str) -> bool:
    """Whether Flower has heard a worker's own heartbeat, which says how often it comes.

    Of one known by its tasks alone it assumes a minute, and takes it to be alive for two after its end.
    """
    metrics = httpx.get(f"{flower}/metrics", auth=AUTH, timeout=5).text
    return f'flower_worker_online{{worker="{process}@node-a"}}' in metrics


def owner(rig: Rig, request_id: str) -> str:
    """The worker that runs a request, by the name of its process."""
    name: str = wait_until(lambda: rig.request_fields(request_id).get("owner"), 10, "an owner")
    return name.partition("@")[0]


async def sees(flower: str, request_id: str, *states: str) -> None:
    """Wait until these are the states of a request's tasks."""

    def is_seen() -> bool:
        return states_of(flower, request_id) == sorted(states)

    try:
        await asyncio.to_thread(wait_until, is_seen, 30)
    except TimeoutError:
        assert states_of(flower, request_id) == sorted(states)


async def test_c151_what_ends_well_is_a_success(rig: Rig, flower: str) -> None:
    async with client(rig) as http:
        answer = await complete(http, "ends well", max_tokens=5)
    await sees(flower, answer["id"], "SUCCESS")


async def test_c151_what_is_cancelled_is_revoked(rig: Rig, flower: str) -> None:
    async with client(rig) as http:
        job = JobReading(await submit_job(http, "is cancelled", max_tokens=400))
        reading = asyncio.create_task(job.read_through(http))
        await job.has_events(2)
        await http.delete(f"/v1/jobs/{job.job_id}")
        await reading
    await sees(flower, job.job_id, "REVOKED")


async def test_c151_what_is_refused_never_becomes_a_task(rig: Rig, flower: str) -> None:
    before = await asyncio.to_thread(tasks_of, flower)
    async with client(rig) as http:
        refused = await http.post("/v1/completions", json={"model": "m", "prompt": [-1]})
        assert refused.status_code == 400
        answer = await complete(http, "comes after it", max_tokens=5)
    await sees(flower, answer["id"], "SUCCESS")

    after = await asyncio.to_thread(tasks_of, flower)
    assert len(after) == len(before) + 1


async def test_c151_a_lost_attempt_stays_as_last_heard_of_and_the_next_succeeds(
    rig: Rig, flower: str
) -> None:
    async with client(rig) as http:
        job = JobReading(await submit_job(http, "loses its worker", max_tokens=300))
        reading = asyncio.create_task(job.read_through(http, 60))
        await sees(flower, job.job_id, "STARTED")
        victim = await asyncio.to_thread(owner, rig, job.job_id)
        await asyncio.to_thread(wait_until, lambda: knows_beat(flower, victim), 30, "a beat")
        await asyncio.to_thread(rig.kill, victim)
        await reading
    # A dead worker cannot say that its task ended.
    await sees(flower, job.job_id, "STARTED", "SUCCESS")

    def is_offline() -> bool:
        return not workers_of(flower).get(f"{victim}@node-a", False)

    await asyncio.to_thread(wait_until, is_offline, 60, "the dead worker goes offline")
    rig.start_worker(victim, "decode")
    rig.wait_for_worker(victim)


async def test_c151_what_fails_is_a_failure(make_rig: Callable[..., Rig]) -> None:
    env = {"POINTSMAN_WORKER_STEP_DELAY_MS": "20", "POINTSMAN_TOTAL_DEADLINE_S": "2"}
    rig = make_rig(workers={"both-0": "both"}, env=env)
    flower = await asyncio.to_thread(start_flower, rig)
    async with client(rig) as http:
        jobs = [JobReading(await submit_job(http, f"late {n}", max_tokens=400)) for n in range(3)]
        await asyncio.gather(*(job.read_through(http) for job in jobs))

    assert all(job.error is not None and job.error["code"] == "timeout" for job in jobs)
    # Where a busy machine keeps the worker from it, the store ends a request a moment later, and the
    # worker hears of a cancellation.
    states = [(await ended(flower, job.job_id)) for job in jobs]
    assert "FAILURE" in states
    assert set(states) <= {"FAILURE", "REVOKED"}


async def ended(flower: str, request_id: str) -> str:
    """The state of a request's one task once it is over."""
    over = ("SUCCESS", "FAILURE", "REVOKED")
    find = lambda: [state for state in states_of(flower, request_id) if state in over]  # noqa: E731
    (state,) = await asyncio.to_thread(wait_until, find, 30, request_id)
    return str(state)
