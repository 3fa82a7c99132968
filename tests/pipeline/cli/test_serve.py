"""`pointsman serve` with all its real processes, on the digest engine."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from rich.console import Console

from pipeline.cli.data_directory import DataDirectory
from pipeline.cli.embedded_redis import free_port
from pipeline.cli.errors import StopRequested
from pipeline.cli.model_store import ModelPlan
from pipeline.cli.screen import Screen
from pipeline.cli.serve import _convert
from pipeline.cli.signal_inbox import SignalInbox
from pipeline.cli.supervisor import Supervisor

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 90.0
PROMPT = "a prompt that must show nowhere"


class Served:
    """A running `pointsman serve` and what it has said so far."""

    def __init__(self, data_dir: Path, *options: str) -> None:
        self.data_dir = data_dir
        self.port, self.flower_port = free_port(), free_port()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pipeline.cli.main", "serve", "--engine", "digest"),
                *("--port", str(self.port), "--flower-port", str(self.flower_port)),
                *("--data-dir", data_dir, "--kv-dram", "16MiB", "--kv-nvme", "32MiB"),
                *("--drain-s", "10", *options),
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.output or self.process.poll() is not None)
        assert text in self.output, self.output

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def child(self, *words: str) -> psutil.Process:
        for process in psutil.Process(self.process.pid).children():
            if all(word in process.cmdline() for word in words):
                return process
        raise AssertionError(f"no child {words}")

    def chat(self, model: str = "digest") -> httpx.Response:
        body = {
            "model": model,
            "max_tokens": 8,
            "temperature": 0,
            "messages": [{"role": "user", "content": PROMPT}],
        }
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        return httpx.post(url, json=body, timeout=60.0, trust_env=False)

    def drain(self, *options: str) -> None:
        command = (sys.executable, "-m", "pipeline.cli.main", "drain", socket.gethostname())
        told = subprocess.run(
            [*command, "--data-dir", self.data_dir, *options],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert told.returncode == 0, told.stdout + told.stderr

    def end(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(LIMIT_S)
        self._reader.join()
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            self.lines.extend(iter(stream.readline, ""))


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(0.05)


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def served(data_dir: Path) -> Iterator[Served]:
    served = Served(data_dir)
    try:
        yield served
    finally:
        served.end()


def test_it_serves_restarts_what_dies_and_leaves_nothing(served: Served, data_dir: Path) -> None:
    served.wait_for("Pointsman is ready.")
    answer = served.chat()
    assert answer.status_code == 200, answer.text
    children = psutil.Process(served.process.pid).children(recursive=True)
    secrets = [
        (data_dir / "flower.auth").read_text().strip().partition(":")[2],
        (data_dir / "redis" / "redis.conf").read_text().split('requirepass "')[1].split('"')[0],
    ]
    command_lines = "\n".join(" ".join(child.cmdline()) for child in children)

    served.child("workers").kill()
    served.wait_for("is ready again")
    assert served.chat().json()["choices"] == answer.json()["choices"]

    children += psutil.Process(served.process.pid).children(recursive=True)
    assert served.end() == 0, served.output
    assert [child for child in children if not is_gone(child)] == []
    assert not (data_dir / "run").exists()
    assert not (data_dir / "serve.lock").exists()
    logs = "".join(path.read_text() for path in (data_dir / "logs").iterdir())
    for secret in (*secrets, PROMPT):
        assert secret not in served.output + command_lines + logs


def test_ctrl_c_during_a_conversion_is_no_fault_of_the_model(tmp_path: Path) -> None:
    plan = ModelPlan("m", tmp_path / "m", str(tmp_path / "not there.gguf"))
    screen = Screen(Console(file=io.StringIO()))
    with SignalInbox() as inbox:
        supervisor = Supervisor(DataDirectory(tmp_path), screen, inbox, None)
        try:
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(StopRequested):
                _convert(plan, screen, supervisor)
        finally:
            supervisor.stop()


def test_a_drained_worker_comes_back_only_if_that_was_asked(data_dir: Path) -> None:
    served = Served(data_dir, "--no-flower", "--workers", "both=1")
    try:
        served.wait_for("Pointsman is ready.")
        answer = served.chat().json()["choices"]
        first = served.child("workers").pid
        served.drain("--restart")
        served.wait_for("both-0 is ready again")
        assert served.child("workers").pid != first
        assert served.chat().json()["choices"] == answer
        served.drain("--force")
        served.wait_for("both-0 was drained; it is down until serve is started again")
        with pytest.raises(AssertionError, match="no child"):
            served.child("workers")
    finally:
        assert served.end() == 0, served.output


def test_flower_shows_both_tasks_of_a_request_and_no_prompt(served: Served, data_dir: Path) -> None:
    served.wait_for("Pointsman is ready.")
    served.chat()
    user, _, password = (data_dir / "flower.auth").read_text().strip().partition(":")
    flower = httpx.Client(
        base_url=f"http://127.0.0.1:{served.flower_port}", auth=(user, password), trust_env=False
    )

    def ended() -> set[str]:
        tasks = flower.get("/api/tasks").json().values()
        return {task["name"] for task in tasks if task["state"] == "SUCCESS"}

    with flower:
        wait_until(lambda: ended() == {"pointsman.prefill", "pointsman.decode"})
        assert PROMPT not in flower.get("/api/tasks").text
        stranger = httpx.get(f"{flower.base_url}/api/tasks", trust_env=False)
        assert stranger.status_code == 401


def test_of_several_models_the_one_asked_for_takes_the_place_of_the_one_not_used(
    data_dir: Path, tmp_path: Path
) -> None:
    # Workers are thought to take 128 MiB each, so that one fits; the other one's is measured.
    options = ["--engine", "script", "--no-flower", "--workers", "both=1", "--model-memory", "140M"]
    for name in ("bells", "cats"):
        book = {"scripts": {"default": {"pieces": [name]}}}
        (tmp_path / f"{name}.json").write_text(json.dumps(book))
        options += ["--model", str(tmp_path / f"{name}.json")]
    served = Served(data_dir, *options)
    try:
        served.wait_for("Pointsman is ready.")
        assert not (data_dir / "logs" / "cats-both-0.log").exists()
        for name in ("bells", "cats"):
            answer = served.chat(name)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == name
        assert served.chat("digest").status_code == 404
        served.wait_for("bells-both-0 has made room")
        command = ["-m", "pipeline.cli.main", "status", "--data-dir", str(data_dir)]
        shown = subprocess.run(
            [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert all(word in shown for word in ("cats-both-0@", "prefill.bells", "prefill.cats"))
        workers = psutil.Process(served.process.pid).children()
        assert sum("workers" in worker.cmdline() for worker in workers) == 1
    finally:
        assert served.end() == 0, served.output


@pytest.mark.slow
def test_no_part_outlives_a_serve_that_was_killed_and_the_next_one_starts(data_dir: Path) -> None:
    killed = Served(data_dir, "--no-flower")
    killed.wait_for("Pointsman is ready.")
    children = psutil.Process(killed.process.pid).children(recursive=True)
    killed.process.kill()
    killed.end()
    following = Served(data_dir, "--no-flower", "--workers", "both=1")
    try:
        following.wait_for("Pointsman is ready.")
        assert [child for child in children if not is_gone(child)] == []
        assert following.chat().status_code == 200
    finally:
        assert following.end() == 0, following.output
