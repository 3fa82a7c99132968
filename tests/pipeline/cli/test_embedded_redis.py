"""The embedded Redis: one address and one memory through stop, crash and restart."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from pipeline.cli.embedded_redis import EmbeddedRedis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    yield server
    server.stop()


def client_of(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url)


def test_it_answers_at_its_url_and_only_with_the_password(server: EmbeddedRedis) -> None:
    with client_of(server) as client:
        assert client.ping() is True
    password = server.url.split(":")[2].split("@")[0]
    stranger = redis.Redis.from_url(server.url.replace(f":{password}@", ""))
    with stranger, pytest.raises(redis.AuthenticationError):
        stranger.get("key")


def test_the_password_stands_in_no_command_line_and_the_file_is_private(
    server: EmbeddedRedis, tmp_path: Path
) -> None:
    password = server.url.split(":")[2].split("@")[0]
    assert server.pid is not None
    assert password not in " ".join(psutil.Process(server.pid).cmdline())
    config = tmp_path / "redis" / "redis.conf"
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert password in config.read_text()


def test_it_evicts_nothing_and_keeps_a_log(server: EmbeddedRedis) -> None:
    with client_of(server) as client:
        settings = client.config_get("*")
    assert settings["maxmemory-policy"] == "noeviction"
    assert settings["appendonly"] == "yes"
    assert settings["appendfsync"] == "everysec"
    assert "pubsub 67108864 16777216 60" in settings["client-output-buffer-limit"]


def test_what_was_stored_survives_a_restart(server: EmbeddedRedis) -> None:
    with client_of(server) as client:
        client.set("key", "value")
        server.restart()
        assert client.get("key") == b"value"


def test_it_comes_back_after_a_crash_at_the_same_url(server: EmbeddedRedis) -> None:
    url = server.url
    server.kill()
    assert not server.is_answering()
    server.start()
    assert server.url == url
    assert server.is_answering()


def test_stop_and_kill_can_be_called_twice(server: EmbeddedRedis) -> None:
    server.stop()
    server.stop()
    server.kill()
    assert server.pid is None


def test_it_serves_on_a_unix_socket_and_opens_no_port(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "r", unix_socket=tmp_path / "redis.sock", persistent=False)
    server.start()
    try:
        with client_of(server) as client:
            assert client.ping() is True
        assert server.pid is not None
        listening = psutil.Process(server.pid).net_connections("inet")
        assert [c for c in listening if c.type is socket.SOCK_STREAM] == []
    finally:
        server.stop()
    assert not (tmp_path / "redis.sock").exists()
