"""The whole pipeline as Redis users with few rights, and what these may not do."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis
from redis.exceptions import NoPermissionError

from pipeline.cli.embedded_redis import free_port
from pipeline.cli.redis_acl import AclUser, acl_file, acl_rules, setuser_line
from tests.flow.rig import REPOSITORY, Rig, wait_until
from tests.flow.talk import JobReading, client, complete, stream, submit_job

PASSWORDS = {user: f"{user.value}-secret" for user in AclUser}


class GuardedRig(Rig):
    """Each part connects as its own user; the tests stay the administrator."""

    def start_kvd(self) -> None:
        for user, password in PASSWORDS.items():
            self.redis.execute_command("ACL", "SETUSER", *acl_rules(user, password))
        super().start_kvd()

    def url_of(self, user: AclUser) -> str:
        host = self.redis_server.url.rpartition("@")[2]
        return f"redis://{user.value}:{PASSWORDS[user]}@{host}"

    def spawn(self, name: str, *command: str, **env: str) -> None:
        user = AclUser.GATEWAY if name.startswith("gateway") else AclUser.WORKER
        super().spawn(name, *command, **env | {"POINTSMAN_REDIS_URL": self.url_of(user)})


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedRig]:
    rig = GuardedRig(tmp_path_factory.mktemp("acl"), env={"POINTSMAN_WORKER_STEP_DELAY_MS": "10"})
    try:
        rig.start()
        yield rig
    finally:
        rig.close()


def denials(rig: Rig) -> list[str]:
    """What Redis refused, as `user: reason object`."""
    entries: Any = rig.redis.acl_log()
    return [
        f"{e['username']}: {e['reason']} {e['object']} ({e['context']})"
        for e in entries
        if "auth" not in str(e["reason"])
    ]


async def test_the_pipeline_works_with_these_users_and_is_denied_nothing(rig: GuardedRig) -> None:
    rig.redis.acl_log_reset()
    async with client(rig) as http:
        await complete(http, "whole", max_tokens=5)
        transcript = await stream(http, "streamed", max_tokens=20)
        assert transcript.is_done
        job = JobReading(await submit_job(http, "to be cancelled", max_tokens=400))
        await http.delete(f"/v1/jobs/{job.job_id}")
        # A lost worker: upkeep, in whoever leads, takes over.
        job = JobReading(await submit_job(http, "survives", max_tokens=60))
        reading = job.read_through(http)
        rig.kill("decode-0")
        rig.start_worker("decode-0", "decode")
        await reading
        assert job.end is not None
    # And a clean stop, with messages given back.
    assert rig.terminate("prefill-0") == 0
    rig.start_worker("prefill-0", "prefill")
    rig.wait_for_worker("prefill-0")
    rig.wait_at_rest()

    assert denials(rig) == []


@pytest.mark.parametrize("user", [AclUser.GATEWAY, AclUser.WORKER, AclUser.FLOWER])
@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("EVAL", "return 1", "0"),
        ("SHUTDOWN",),
        ("ACL", "LIST"),
        ("SAVE",),
        ("GET", "somebody:elses"),
        ("CLIENT", "KILL", "ID", "1"),
        ("REPLICAOF", "127.0.0.1", "1"),
    ],
)
def test_no_user_may_do_what_only_an_administrator_does(
    rig: GuardedRig, user: AclUser, command: tuple[str, ...]
) -> None:
    with redis.Redis.from_url(rig.url_of(user)) as connection, pytest.raises(NoPermissionError):
        connection.execute_command(*command)


def test_a_gateway_may_not_reach_celerys_remote_control(rig: GuardedRig) -> None:
    with redis.Redis.from_url(rig.url_of(AclUser.GATEWAY)) as connection:
        with pytest.raises(NoPermissionError):
            connection.publish("/0.celery.pidbox", "shutdown")
        with pytest.raises(NoPermissionError):
            connection.publish("/0.celeryev/task.succeeded", "forged")


def test_flower_may_read_no_request(rig: GuardedRig) -> None:
    with redis.Redis.from_url(rig.url_of(AclUser.FLOWER)) as connection:
        for command in (("HGET", "request:x", "prompt"), ("GET", "tokens:x")):
            with pytest.raises(NoPermissionError):
                connection.execute_command(*command)


def start_flower(rig: GuardedRig, port: int) -> None:
    env = rig.environment(
        FLOWER_BASIC_AUTH="watch:word", POINTSMAN_REDIS_URL=rig.url_of(AclUser.FLOWER)
    )
    command = [
        sys.executable, "-m", "celery", "-A", "pipeline.tasks.app", "flower",
        "--address=127.0.0.1", f"--port={port}", "--read_only",
    ]  # fmt: skip
    with (rig.folder / "flower.log").open("ab") as log:
        rig.processes["flower"] = subprocess.Popen(
            command, env=env, cwd=REPOSITORY, stdout=log, stderr=log, process_group=0
        )


async def test_flower_sees_the_tasks_as_its_user(rig: GuardedRig) -> None:
    rig.redis.acl_log_reset()
    port = free_port()
    start_flower(rig, port)

    def tasks() -> list[str]:
        try:
            url = f"http://127.0.0.1:{port}/api/tasks"
            listed = httpx.get(url, auth=("watch", "word"), timeout=2).json()
        except (httpx.HTTPError, ValueError):
            return []
        return [task["name"] for task in listed.values()]

    async with client(rig) as http:
        deadline_s = time.monotonic() + 30
        while "pointsman.prefill" not in tasks():
            assert time.monotonic() < deadline_s, rig.log("flower")[-1500:]
            await complete(http, "for flower", max_tokens=2)
    wait_until(lambda: "pointsman.decode" in tasks(), 10)
    assert [line for line in denials(rig) if line.startswith("flower")] == []


def test_the_file_says_what_the_lines_say_and_holds_no_password() -> None:
    lines = acl_file(PASSWORDS, "admin-secret").split("\n")
    for user, password in PASSWORDS.items():
        name, _, *rules = acl_rules(user, password)
        assert " ".join(["user", name, *rules]) in lines
        assert password not in "".join(lines) + setuser_line(user, password)
