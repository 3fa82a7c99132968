"""The supervisor with small real children: restart, order of the end, nothing left behind."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from pipeline.cli.child import Child, Part, log_says
from pipeline.cli.data_directory import DataDirectory
from pipeline.cli.errors import PartDied, PartNotReady
from pipeline.cli.screen import Screen
from pipeline.cli.signal_inbox import SignalInbox
from pipeline.cli.supervisor import Supervisor

# Says when it is ready and when it was told to end; `$$` survives the exec of the leash.
POLITE = 'trap "echo told to end; exit 0" TERM; echo up $$; while :; do sleep 0.05; done'
STUBBORN = 'trap "" TERM; echo up $$; sleep 300 & echo grandchild $!; while :; do sleep 0.05; done'


def part(name: str, script: str, *, rank: int = 0, drain_s: float = 5.0) -> Part:
    return Part(name, ("bash", "-c", script), dict(os.environ), log_says("up "), rank, drain_s)


def wait_until(is_so: Callable[[], bool], limit_s: float = 15.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Gone, or a zombie that only its new parent can bury."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Scene:
    """A supervisor, what it shows, and its logs."""

    def __init__(self, path: Path, inbox: SignalInbox) -> None:
        self.shown = io.StringIO()
        self.directory = DataDirectory(path)
        self.directory.create()
        self.inbox = inbox
        screen = Screen(Console(file=self.shown, force_terminal=False))
        self.supervisor = Supervisor(self.directory, screen, inbox, None)

    def log(self, name: str) -> str:
        return self.directory.log_path(name).read_text()

    def pids(self, name: str, word: str = "up") -> list[int]:
        lines = [line.split() for line in self.log(name).splitlines()]
        return [int(line[1]) for line in lines if line[0] == word]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with SignalInbox() as inbox:
        scene = Scene(tmp_path, inbox)
        yield scene
        scene.supervisor.stop()


def signal_when(is_so: Callable[[], bool]) -> threading.Thread:
    """Ask this process to stop, as Ctrl-C would, once something is so."""

    def run() -> None:
        try:
            wait_until(is_so)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_start_returns_when_all_parts_are_ready(scene: Scene) -> None:
    scene.supervisor.start([part("a", POLITE), part("b", POLITE)], 10.0)
    assert "up" in scene.log("a")
    assert "up" in scene.log("b")


def test_parts_end_by_rank_and_leave_no_process(scene: Scene) -> None:
    scene.supervisor.start([part("last", POLITE, rank=2), part("first", POLITE, rank=1)], 10.0)
    pids = scene.pids("last") + scene.pids("first")
    scene.supervisor.stop()
    assert all(is_gone(pid) for pid in pids)
    shown = scene.shown.getvalue()
    assert shown.index("first: stopped (exit code 0)") < shown.index("last: stopping")


def test_what_ignores_sigterm_is_killed_with_its_children_after_the_limit(scene: Scene) -> None:
    scene.supervisor.start([part("mule", STUBBORN, drain_s=0.2)], 10.0)
    wait_until(lambda: bool(scene.pids("mule", "grandchild")))
    pids = scene.pids("mule") + scene.pids("mule", "grandchild")
    scene.supervisor.stop()
    assert "mule: stopped (SIGKILL)" in scene.shown.getvalue()
    wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_a_part_that_dies_is_started_again_and_said_so(scene: Scene) -> None:
    scene.supervisor.start([part("a", POLITE)], 10.0)
    os.kill(scene.pids("a")[0], signal.SIGKILL)
    thread = signal_when(lambda: "a is ready again" in scene.shown.getvalue())
    scene.supervisor.watch()
    thread.join()
    assert len(scene.pids("a")) == 2
    assert "a ended (SIGKILL); it is started again in 0.5 s" in scene.shown.getvalue()


def test_a_part_that_was_told_to_leave_stays_down_and_the_others_run_on(scene: Scene) -> None:
    leaving = replace(part("a", POLITE), stays_down=log_says("told to end"))
    scene.supervisor.start([leaving, part("b", POLITE)], 10.0)
    os.kill(scene.pids("a")[0], signal.SIGTERM)
    os.kill(scene.pids("b")[0], signal.SIGTERM)
    thread = signal_when(lambda: "b is ready again" in scene.shown.getvalue())
    scene.supervisor.watch()
    thread.join()
    assert (len(scene.pids("a")), len(scene.pids("b"))) == (1, 2)
    assert "a was drained; it is down until serve is started again" in scene.shown.getvalue()


def test_a_part_runs_while_it_is_wanted(scene: Scene) -> None:
    supervisor = scene.supervisor
    supervisor.add([part("a", POLITE)])
    steps = iter(
        [
            lambda: supervisor.want(["a"], is_wanted=True),
            lambda: supervisor.are_ready(["a"]) and supervisor.num_bytes(["a"]) > 0,
            lambda: supervisor.want(["a"], is_wanted=False),
            lambda: "a has made room" in scene.shown.getvalue() and not supervisor.num_bytes(["a"]),
            lambda: supervisor.want(["a"], is_wanted=True),
            lambda: len(scene.pids("a")) == 2,
        ]
    )
    step = [next(steps)]
    is_over = threading.Event()

    def on_look(_: float) -> None:
        if step[0]() in (None, True):
            step[0] = next(steps, lambda: is_over.set() or False)

    thread = signal_when(is_over.is_set)
    supervisor.watch(on_look)
    thread.join()
    assert is_over.is_set()
    assert "told to end" in scene.log("a")


def follow(scene: Scene, *steps: Callable[[], object]) -> None:
    """Watch until all steps were taken; one that answers False is tried again at the next look."""
    left = list(steps)

    def on_look(_: float) -> None:
        if left and left[0]() is not False:
            left.pop(0)

    thread = signal_when(lambda: not left)
    scene.supervisor.watch(on_look)
    thread.join()
    assert not left


def test_a_part_that_died_is_not_ready_before_it_is_again(scene: Scene) -> None:
    scene.supervisor.start([part("a", POLITE)], 10.0)
    assert scene.supervisor.are_ready(["a"])
    os.kill(scene.pids("a")[0], signal.SIGKILL)
    wait_until(lambda: not scene.supervisor.are_ready(["a"]))


def test_a_part_that_is_wanted_again_while_it_leaves_ends_first_and_is_no_death(
    scene: Scene,
) -> None:
    supervisor = scene.supervisor
    supervisor.start([part("mule", STUBBORN, drain_s=0.2)], 10.0)
    follow(
        scene,
        lambda: supervisor.want(["mule"], is_wanted=False),
        lambda: supervisor.want(["mule"], is_wanted=True),
        lambda: len(scene.pids("mule")) == 2,
        lambda: supervisor.are_ready(["mule"]),
    )
    assert "mule has made room" in scene.shown.getvalue()
    assert "mule ended" not in scene.shown.getvalue()


def test_a_part_that_was_drained_while_it_made_room_stays_down(scene: Scene) -> None:
    supervisor = scene.supervisor
    leaving = replace(part("a", POLITE), stays_down=log_says("told to end"))
    supervisor.start([leaving], 10.0)
    assert not supervisor.is_drained()
    follow(
        scene,
        lambda: supervisor.want(["a"], is_wanted=False),
        lambda: supervisor.is_drained() and supervisor.num_bytes(["a"]) == 0,
        lambda: supervisor.want(["a"], is_wanted=True),
        lambda: None,
    )
    assert len(scene.pids("a")) == 1
    assert "a was drained" in scene.shown.getvalue()


def test_a_part_that_dies_before_it_is_ready_ends_the_start_with_its_last_words(
    scene: Scene,
) -> None:
    with pytest.raises(PartDied, match="no such model") as died:
        scene.supervisor.start([part("a", "echo no such model; exit 3")], 10.0)
    assert died.value.exit_code == 3


def test_a_part_that_stays_silent_ends_the_start_after_the_limit(scene: Scene) -> None:
    with pytest.raises(PartNotReady, match="not ready"):
        scene.supervisor.start([part("a", "sleep 60")], 0.3)


def test_a_second_signal_hurries_the_end(scene: Scene) -> None:
    scene.supervisor.start([part("mule", STUBBORN, drain_s=60.0)], 10.0)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
    began_s = time.monotonic()
    scene.supervisor.stop()
    assert time.monotonic() - began_s < 10.0


SUPERVISOR_PROGRAM = """
import os, sys
from pathlib import Path
from rich.console import Console
from pipeline.cli.child import Child, Part, log_says
from pipeline.cli.data_directory import DataDirectory
from pipeline.cli.screen import Screen
from pipeline.cli.signal_inbox import SignalInbox
from pipeline.cli.supervisor import Supervisor

directory = DataDirectory(Path(sys.argv[1]))
directory.create()
with SignalInbox() as inbox, directory.locked() as fd:
    supervisor = Supervisor(directory, Screen(Console()), inbox, fd)
    parts = [
        Part(name, ("bash", "-c", script), dict(os.environ), log_says("up "), 0, 5.0)
        for name, script in zip(("polite", "stubborn"), sys.argv[2:])
    ]
    supervisor.start(parts, 10.0)
    print("watching", flush=True)
    supervisor.watch()
"""


def test_no_child_outlives_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR_PROGRAM, tmp_path, POLITE, STUBBORN],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[3],
    )
    assert supervisor.stdout is not None
    try:
        for line in supervisor.stdout:
            if line.strip() == "watching":
                break
        logs = [DataDirectory(tmp_path).log_path(name) for name in ("polite", "stubborn")]
        wait_until(lambda: "grandchild" in logs[1].read_text())
        words = [line.split() for log in logs for line in log.read_text().splitlines()]
        pids = [int(line[1]) for line in words if line[0] in ("up", "grandchild")]
        assert len(pids) == 3
    finally:
        supervisor.kill()
        supervisor.wait()
        supervisor.stdout.close()
    wait_until(lambda: all(is_gone(pid) for pid in pids), limit_s=20.0)
    with DataDirectory(tmp_path).locked(patience_s=10.0):
        pass


def test_a_long_log_is_moved_aside_while_its_process_writes_on(tmp_path: Path) -> None:
    talk = "for i in $(seq 500); do echo old $i; done"
    script = f"trap 'echo new; exit 0' TERM; {talk}; while :; do sleep 0.05; done"
    talker = Child(replace(part("talker", script), env=dict(os.environ)), tmp_path / "talker.log")
    talker.spawn()
    wait_until(lambda: "old 500" in talker.log_path.read_text())
    talker.trim_log(limit_bytes=1000)
    assert talker.log_path.read_bytes() == b""
    assert "old 500" in (tmp_path / "talker.log.1").read_text()
    talker.signal_group(signal.SIGTERM)
    wait_until(lambda: not talker.is_running)
    assert talker.reap() == 0
    assert talker.log_of_this_life().endswith(b"new\n")
    assert b"old" not in talker.log_of_this_life()
