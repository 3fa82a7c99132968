"""Queue, workers and Redis: messages are small, cancelled is cancelled, Flower tells no prompt."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle  # noqa: TID251 - to show that it is refused
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from pipeline.cli.embedded_redis import free_port
from pipeline.cli.flower import flower_command
from pipeline.ledger.messages import broker_lists
from tests.flow.rig import REPOSITORY, Rig, wait_until
from tests.flow.talk import JobReading, body, client, complete, stream, submit_job, text_of


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(env={"POINTSMAN_WORKER_STEP_DELAY_MS": "10", "POINTSMAN_LOG_LEVEL": "debug"})


def stop_workers(rig: Rig) -> None:
    for name in list(rig.workers):
        assert rig.terminate(name) == 0


def start_workers(rig: Rig) -> None:
    for name, role in list(rig.workers.items()):
        rig.start_worker(name, role)
    for name in rig.workers:
        rig.wait_for_worker(name)
    rig.wait_ready()


def num_tokens_run(rig: Rig) -> int:
    return sum(b["num_prefill_tokens"] + b["num_decode_tokens"] for b in rig.beats().values())


async def test_c143_cancelled_in_the_queue_stays_cancelled(rig: Rig) -> None:
    for name in rig.workers:
        rig.freeze(name)
    async with client(rig) as http:
        job_id = await submit_job(http, "never to be run " * 4, max_tokens=20)
        answer = await http.delete(f"/v1/jobs/{job_id}")
        assert answer.json()["status"] == "cancelled"
        for name in rig.workers:
            rig.kill(name)
        start_workers(rig)
        assert await text_of(http, "another one", max_tokens=3)
        await asyncio.sleep(1.5)

        assert num_tokens_run(rig) <= len("another one") + 1 + 3
        status = (await http.get(f"/v1/jobs/{job_id}")).json()
        assert status["status"] == "cancelled"
        assert status["usage"]["completion_tokens"] == 0


async def test_a_running_job_that_is_cancelled_stops_within_a_few_steps(rig: Rig) -> None:
    async with client(rig) as http:
        job = JobReading(await submit_job(http, "to be stopped", max_tokens=400))
        reading = asyncio.create_task(job.read_through(http))
        await job.has_events(10)
        cancelled_s = time.monotonic()
        await http.delete(f"/v1/jobs/{job.job_id}")
        await asyncio.wait_for(reading, 5)

        assert time.monotonic() - cancelled_s < 1.0
        assert job.end is not None
        assert job.end["finish_reason"] == "cancelled"
        assert len(job.pieces) < 60
    rig.wait_at_rest(3)


async def test_c134_without_a_decode_worker_requests_wait_for_one(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(workers={"prefill-0": "prefill"}, env={"POINTSMAN_QUEUE_DEADLINE_S": "4"})
    async with client(rig) as http:
        wait_until(lambda: len(rig.beats()) == 1, 5)
        started_s = time.monotonic()
        answers = await asyncio.gather(
            *(http.post("/v1/completions", json=body(f"p{n}", max_tokens=4)) for n in range(5))
        )
        waited_s = time.monotonic() - started_s
        assert {answer.status_code for answer in answers} == {503}
        assert {answer.json()["error"]["code"] for answer in answers} == {"no_workers"}
        assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in answers)
        assert 3.5 < waited_s < 6

        # A worker may take its time to start on a busy machine.
        rig.kill("gateway")
        rig.env["POINTSMAN_QUEUE_DEADLINE_S"] = "60"
        await asyncio.to_thread(rig.start_gateway)
        waiting = [asyncio.create_task(complete(http, f"q{n}", max_tokens=4)) for n in range(5)]
        rig.start_worker("decode-0", "decode")
        for answer in await asyncio.gather(*waiting):
            assert answer["usage"]["completion_tokens"] == 4
    rig.wait_at_rest()


async def test_c148_messages_are_plain_and_bounded(rig: Rig) -> None:
    prompt = list(range(32, 127)) * 5
    for name in rig.workers:
        rig.freeze(name)
    try:
        async with client(rig) as http:
            http.headers["Authorization"] = "Bearer sk-secret-key"
            # A frozen worker may still be sent one message; the others stay in the broker.
            job_ids = [await submit_job(http, prompt, max_tokens=4) for _ in range(3)]

        def messages() -> list[bytes]:
            return [m for name in broker_lists("prefill.m") for m in rig.redis.lrange(name, 0, -1)]

        dump = wait_until(lambda: len(messages()) >= 2 and messages(), 10, "messages in the broker")
        assert all(len(message) < 2048 for message in dump)
        assert all(message.startswith(b"{") and b"sk-secret-key" not in message for message in dump)
    finally:
        for name in rig.workers:
            rig.thaw(name)
    async with client(rig) as http:
        for job_id in job_ids:
            job = JobReading(job_id)
            await job.read_through(http)
            assert job.end is not None


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (self.path,)


async def test_c148_a_pickle_message_is_refused_and_does_not_run(rig: Rig) -> None:
    mark = rig.folder / "pickle-ran"
    payload = pickle.dumps(((Bomb(str(mark)),), {}, {}))
    message = {
        "body": base64.b64encode(payload).decode(),
        "content-encoding": "binary",
        "content-type": "application/x-python-serialize",
        "headers": {"lang": "py", "task": "pointsman.prefill", "id": "evil", "argsrepr": ""},
        "properties": {
            "correlation_id": "evil",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": "prefill.m"},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": "evil-tag",
        },
    }
    rig.redis.lpush("prefill.m", json.dumps(message))
    wait_until(lambda: not rig.redis.llen("prefill.m"), 5, "the worker took it")
    async with client(rig) as http:
        assert await text_of(http, "still alive", max_tokens=3)

    assert not mark.exists()


@pytest.mark.parametrize(
    "task_body",
    [b"[[], {}, {}]", b"[[5], {}, {}]", b'[["no-such-request"], {}, {}]', b"nonsense"],
)
async def test_a_message_that_makes_no_sense_harms_nobody(rig: Rig, task_body: bytes) -> None:
    message = {
        "body": base64.b64encode(task_body).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"lang": "py", "task": "pointsman.prefill", "id": f"odd-{hash(task_body)}"},
        "properties": {
            "correlation_id": "odd",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": "prefill.m"},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": f"odd-{hash(task_body)}",
        },
    }
    rig.redis.lpush("prefill.m", json.dumps(message))
    wait_until(lambda: not rig.redis.llen("prefill.m"), 5, "the worker took it")
    async with client(rig) as http:
        assert await text_of(http, "still alive", max_tokens=3)


@pytest.fixture(scope="module")
def flower(rig: Rig) -> Any:
    port = free_port()
    command = flower_command("127.0.0.1", port, None)
    env = rig.environment(FLOWER_BASIC_AUTH="watch:word")
    with (rig.folder / "flower.log").open("ab") as log:
        process = subprocess.Popen(
            command, env=env, cwd=REPOSITORY, stdout=log, stderr=log, process_group=0
        )
    rig.processes["flower"] = process
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/healthcheck", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(answers, 30, "flower")
    return url


async def test_flower_asks_for_a_password_and_lets_nobody_act(rig: Rig, flower: str) -> None:
    worker = next(iter(rig.beats())).partition("#")[0]
    acts = [f"/api/worker/shutdown/{worker}", "/api/task/revoke/x?terminate=true"]
    acts += ["/api/task/async-apply/pointsman.decode"]
    async with httpx.AsyncClient(base_url=flower, timeout=5) as stranger:
        for path in ("/", "/tasks", "/api/tasks", "/api/workers"):
            assert (await stranger.get(path)).status_code == 401
        assert (await stranger.get("/api/tasks", auth=("watch", "wrong"))).status_code == 401
        for path in acts:
            assert (await stranger.post(path)).status_code == 401
            assert (await stranger.post(path, auth=("watch", "word"))).status_code == 403
    async with client(rig) as http:
        assert await text_of(http, "still there", max_tokens=3)


async def test_c149_flower_lists_the_tasks_and_no_prompt(rig: Rig, flower: str) -> None:
    auth = ("watch", "word")
    async with client(rig) as http:
        http.headers["Authorization"] = "Bearer sk-test-key"
        await stream(http, "SECRET-123 is my prompt", max_tokens=5)
        await complete(http, "SECRET-123 is another prompt", max_tokens=1)

    def tasks() -> dict[str, Any]:
        listed: dict[str, Any] = httpx.get(f"{flower}/api/tasks", auth=auth, timeout=5).json()
        return listed

    def has_both() -> bool:
        done = [t["name"] for t in tasks().values() if t["state"] == "SUCCESS"]
        return done.count("pointsman.prefill") >= 2 and "pointsman.decode" in done

    wait_until(has_both, 10, "both tasks in Flower with state SUCCESS")
    paths = ["/api/tasks", "/tasks"]
    paths += [f"{page}/{task_id}" for task_id in tasks() for page in ("/task", "/api/task/info")]
    async with httpx.AsyncClient(base_url=flower, auth=auth, timeout=5) as watcher:
        pages = [(await watcher.get(path)).text for path in paths]
    logs = [path.read_text(errors="replace") for path in rig.folder.glob("*.log")]
    async with client(rig) as http:
        metrics = (await http.get("/metrics")).text
        assert (
            await http.get(f"{flower}/api/tasks", headers={"Authorization": ""})
        ).status_code == 401
    password = urlsplit(rig.redis_server.url).password
    assert password
    for text in [*pages, *logs, metrics]:
        for secret in ("SECRET-123", "sk-test-key", password):
            assert secret not in text
    assert any("cmpl-" in page for page in pages), "request ids are there"


async def test_a_cancelled_request_is_revoked_in_flower(rig: Rig, flower: str) -> None:
    async with client(rig) as http:
        job = JobReading(await submit_job(http, "to be revoked", max_tokens=400))
        reading = asyncio.create_task(job.read_through(http))
        await job.has_events(5)
        await http.delete(f"/v1/jobs/{job.job_id}")
        await reading

    def state() -> str | None:
        listed = httpx.get(f"{flower}/api/tasks", auth=("watch", "word"), timeout=5).json()
        for task_id, task in listed.items():
            if task_id.startswith(f"{job.job_id}.decode"):
                return str(task["state"])
        return None

    wait_until(lambda: state() == "REVOKED", 10, "REVOKED")


async def test_celery_inspect_knows_the_workers(rig: Rig) -> None:
    result = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "celery", "-A", "pipeline.tasks.app", "inspect", "stats", "--json"],
        env=rig.environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "prefill-0@node-a" in result.stdout
    assert '"engine"' in result.stdout


async def test_c156_probes_tell_what_is(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(workers={"prefill-0": "prefill"})
    alive = ("/livez", "/health", "/healthz")

    def codes() -> dict[str, int]:
        answers = {}
        for path in (*alive, "/readyz"):
            started_s = time.monotonic()
            answers[path] = httpx.get(rig.base_url + path, timeout=5).status_code
            assert time.monotonic() - started_s < 0.5
        return answers

    def assert_head_agrees() -> None:
        for path, code in codes().items():
            assert httpx.head(rig.base_url + path, timeout=5).status_code == code

    assert_head_agrees()
    assert codes() == dict.fromkeys(alive, 200) | {"/readyz": 503}
    rig.start_worker("decode-0", "decode")
    rig.wait_for_worker("decode-0")
    wait_until(lambda: codes()["/readyz"] == 200, 5)
    assert_head_agrees()
    rig.freeze("decode-0")
    wait_until(lambda: codes()["/readyz"] == 503, 6)
    rig.thaw("decode-0")
    wait_until(lambda: codes()["/readyz"] == 200, 6)
    rig.redis_server.stop()
    wait_until(lambda: codes() == dict.fromkeys(alive, 200) | {"/readyz": 503}, 6)
    rig.redis_server.start()
    wait_until(lambda: codes()["/readyz"] == 200, 15)
    async with client(rig) as http:
        assert await text_of(http, "after Redis came back", max_tokens=5)
