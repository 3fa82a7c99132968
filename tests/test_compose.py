"""docker-compose.yml says what the command line understands, and opens nothing to the world."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from typer.main import get_command

from pipeline.cli.embedded_redis import free_port
from pipeline.cli.main import app
from pipeline.cli.redis_acl import AclUser, acl_file
from pipeline.cli.redis_binary import find_redis_binary
from tests.flow.rig import wait_until

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docker-compose.yml").read_text()
SERVICES: dict[str, Any] = yaml.safe_load(TEXT)["services"]
MONITORING: dict[str, Any] = yaml.safe_load((ROOT / "deploy/monitoring.yml").read_text())[
    "services"
]
OURS = sorted(name for name, service in SERVICES.items() if "build" in service)


def option_names(command: str) -> set[str]:
    found = get_command(app).commands[command]  # type: ignore[attr-defined]
    return {name for parameter in found.params for name in parameter.opts}


def test_both_profiles_start_every_part() -> None:
    def names(profile: str) -> set[str]:
        return {name for name, service in SERVICES.items() if profile in service["profiles"]}

    shared = {"acl", "redis", "model", "kvd", "gateway", "flower"}
    assert names("cpu") == shared | {"prefill", "decode"}
    assert names("gpu") == shared | {"prefill-gpu", "decode-gpu"}


@pytest.mark.parametrize(("name", "device"), [("decode", None), ("decode-gpu", "cuda")])
def test_workers_compute_on_the_device_of_their_profile(name: str, device: str | None) -> None:
    assert SERVICES[name]["environment"].get("POINTSMAN_WORKER_DEVICE") == device


@pytest.mark.parametrize("name", OURS)
def test_each_command_is_one_of_the_command_line_with_options_that_exist(name: str) -> None:
    command, *arguments = SERVICES[name]["command"]
    options = [argument for argument in arguments if argument.startswith("--")]
    assert set(options) <= option_names(command)
    assert all(isinstance(argument, str) for argument in arguments)


@pytest.mark.parametrize("name", sorted(SERVICES | MONITORING))
def test_ports_are_published_on_loopback_only(name: str) -> None:
    ports = (SERVICES | MONITORING)[name].get("ports", [])
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_monitoring_mounts_what_is_there_and_scrapes_the_gateway() -> None:
    sources = {mount.split(":")[0] for part in MONITORING.values() for mount in part["volumes"]}
    files = {ROOT / source for source in sources if source.startswith("./")}
    assert len(files) == 3
    assert all(path.is_dir() for path in files)
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (target,) = scraped["scrape_configs"][0]["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert SERVICES[host]["command"][-2:] == ["--port", port]


def test_no_secret_stands_in_the_file() -> None:
    for match in re.finditer(r"(?im)^\s*[\w]*(password|basic_auth)[\w]*:\s*(\S.*)", TEXT):
        assert match[2].startswith(("${", "*")), match[0]
    passwords = re.findall(r"redis://\w+:([^@]*)@", TEXT)
    assert {re.sub(r":\?.*", "}", password) for password in passwords} == {
        f"${{REDIS_{user.name}_PASSWORD}}" for user in AclUser
    }


@pytest.mark.parametrize("name", OURS)
def test_each_part_is_a_redis_user_of_its_own(name: str) -> None:
    url = SERVICES[name].get("environment", {}).get("POINTSMAN_REDIS_URL", "redis://none:")
    expected = {"gateway": "gateway", "flower": "flower", "acl": "none"}.get(name, "worker")
    assert url.startswith(f"redis://{expected}:")


def test_redis_gets_its_users_in_a_file_and_loses_nothing() -> None:
    command = " ".join(SERVICES["redis"]["command"])
    assert "--requirepass" not in command
    assert "--aclfile /acl/users.acl" in command
    for setting in ("--appendonly yes", "--appendfsync everysec", "--maxmemory-policy noeviction"):
        assert setting in command
    assert "pubsub 64mb 16mb 60" in command


def test_the_options_of_redis_are_ones_that_a_server_takes(tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    users.write_text(acl_file(dict.fromkeys(AclUser, "secret"), "admin"))
    port = free_port()
    options = [
        {"/acl/users.acl": str(users), "/data": str(tmp_path)}.get(word, word)
        for word in SERVICES["redis"]["command"][1:]
    ]
    server = subprocess.Popen([str(find_redis_binary().path), *options, "--port", str(port)])
    try:
        admin = redis.Redis.from_url(f"redis://:admin@127.0.0.1:{port}/0")
        wait_until(lambda: is_answering(admin), 10, "redis with the options of compose")
        limit = admin.config_get("client-output-buffer-limit")["client-output-buffer-limit"]
        assert "pubsub 67108864 16777216 60" in str(limit)
        assert admin.config_get("save")["save"] == ""
        assert sorted(admin.acl_users()) == ["default", "flower", "gateway", "worker"]
        admin.close()
    finally:
        server.terminate()
        server.wait(10)


def is_answering(connection: redis.Redis) -> bool:
    try:
        return bool(connection.ping())
    except redis.ConnectionError:
        return False


def test_every_service_that_runs_on_has_a_health_check_and_time_to_end() -> None:
    for name, service in SERVICES.items():
        if name not in ("model", "acl"):
            assert "healthcheck" in service, name
            assert "stop_grace_period" in service, name


def test_workers_and_cache_daemon_share_the_socket_and_the_node() -> None:
    for name in ("kvd", "prefill", "decode", "prefill-gpu", "decode-gpu"):
        assert "run:/run/pointsman" in SERVICES[name]["volumes"], name
        assert "/run/pointsman/kvd.sock" in SERVICES[name]["command"], name
        assert SERVICES[name]["environment"]["POINTSMAN_NODE"] == "node0"


def test_only_the_gpu_profile_reserves_a_device() -> None:
    with_device = {name for name, service in SERVICES.items() if "deploy" in service}
    assert with_device == {"prefill-gpu", "decode-gpu"}


def test_the_dockerfile_has_both_targets_and_neither_runs_as_root() -> None:
    stages = re.split(r"(?m)^FROM ", (ROOT / "Dockerfile").read_text())[1:]
    by_name = {re.search(r" AS (\S+)", stage)[1]: stage for stage in stages}  # type: ignore[index]
    for target in {
        service["build"]["target"] for name, service in SERVICES.items() if name in OURS
    }:
        assert "\nUSER pointsman\n" in by_name[target]


def test_docker_compose_reads_the_file() -> None:
    try:
        found = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no docker on this machine")
    if found.returncode != 0:
        pytest.skip("docker has no compose plug-in on this machine")
    read = subprocess.run(
        ["docker", "compose", "--profile", "cpu", "--profile", "gpu", "config", "--format", "json"],
        cwd=ROOT,
        env={
            **os.environ,
            "FLOWER_BASIC_AUTH": "u:p",
            **{f"REDIS_{name}PASSWORD": "p" for name in ("", "GATEWAY_", "WORKER_", "FLOWER_")},
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert read.returncode == 0, read.stderr
    assert set(json.loads(read.stdout)["services"]) == set(SERVICES)
