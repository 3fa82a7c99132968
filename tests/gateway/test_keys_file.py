"""The keys file changes under a running gateway."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs

from gateway.auth import KeysFileBroken
from gateway.http_errors import KeyRefused
from gateway.keys_file import LOOK_S, KeysFile


def line(key: str) -> str:
    return f"tenant {hashlib.sha256(key.encode()).hexdigest()}\n"


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Watched:
    """A keys file and who watches it."""

    def __init__(self, path: Path, *keys: str) -> None:
        self.path = path
        self.clock = Clock()
        self.write(*keys)
        self.keys = KeysFile(path, self.clock)

    def write(self, *keys: str) -> None:
        self.path.write_text("".join(map(line, keys)))

    def pass_by(self, num_looks: int) -> None:
        for _ in range(num_looks):
            self.clock.now_s += LOOK_S
            _ = self.keys.ring

    def lets_in(self, key: str) -> bool:
        try:
            self.keys.ring.find(f"Bearer {key}")
        except KeyRefused:
            return False
        return True


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "keys", "sk-old", "sk-leaked")


def test_a_key_comes_and_another_goes(watched: Watched) -> None:
    watched.write("sk-old", "sk-new")
    assert watched.lets_in("sk-leaked"), "it looks once a second"

    watched.pass_by(2)

    assert [watched.lets_in(key) for key in ("sk-old", "sk-new", "sk-leaked")] == [
        True,
        True,
        False,
    ]


def test_a_file_is_not_read_while_somebody_writes_it(watched: Watched) -> None:
    watched.write()
    watched.pass_by(1)
    watched.write("sk-old", "sk-leaked", "sk-new")
    watched.pass_by(1)
    assert watched.lets_in("sk-old")
    assert not watched.lets_in("sk-new")
    watched.pass_by(1)
    assert watched.lets_in("sk-new")


@pytest.mark.parametrize("content", [b"sk-plain", b"\xff\xfe", None])
def test_a_broken_file_changes_nothing_and_is_told_once(
    watched: Watched, content: bytes | None
) -> None:
    watched.path.unlink()
    if content is not None:
        watched.path.write_bytes(content)

    with capture_logs() as lines:
        watched.pass_by(5)

    assert [told["event"] for told in lines] == ["keys_not_read"]
    assert str(watched.path) in lines[0]["error"]
    assert "sk-plain" not in str(lines)
    assert watched.lets_in("sk-old")
    watched.write("sk-new")
    watched.pass_by(2)
    assert watched.lets_in("sk-new")
    assert not watched.lets_in("sk-old")


def test_without_a_file_everybody_is_let_in_for_good(tmp_path: Path) -> None:
    clock = Clock()
    keys = KeysFile(None, clock)
    clock.now_s = 10
    assert keys.ring.is_open


def test_a_broken_file_at_the_start_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-plain")
    with pytest.raises(KeysFileBroken):
        KeysFile(tmp_path / "keys")


async def test_a_gateway_lets_a_new_key_in(
    keyed_app: FastAPI, keyed_http: httpx.AsyncClient, keys_path: Path
) -> None:
    headers = {"authorization": "Bearer sk-new"}
    assert (await keyed_http.get("/v1/models", headers=headers)).status_code == 401
    clock = Clock()
    keyed_app.state.services.keys_file._clock_s = clock
    with keys_path.open("a") as file:
        file.write("\n" + line("sk-new"))
    for _ in range(2):
        clock.now_s += 1e9
        answer = await keyed_http.get("/v1/models", headers=headers)
    assert answer.status_code != 401
