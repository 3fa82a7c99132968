"""Starts parts, restarts those that die, and ends them in order."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from itertools import groupby

from pipeline.cli import guardian
from pipeline.cli.child import Child, Part
from pipeline.cli.data_directory import DataDirectory
from pipeline.cli.errors import PartDied, PartNotReady, StopRequested
from pipeline.cli.screen import Screen
from pipeline.cli.signal_inbox import SignalInbox

POLL_S = 0.1
HURRY_S = 1.0
# What a killed supervisor's children get between SIGTERM and SIGKILL.
GUARDIAN_GRACE_S = 10.0


class Supervisor:
    """Owns the children of one `pointsman serve`. Everything happens in the main thread.

    `lock_fd` is kept open in every child, so that the data directory stays taken until the last of
    them is gone. A part that dies after it was ready once is started again, for ever, with a delay
    that grows from 0.5 s to 30 s, unless it was told to leave.
    """

    def __init__(
        self, data_dir: DataDirectory, screen: Screen, inbox: SignalInbox, lock_fd: int | None
    ) -> None:
        self._data_dir = data_dir
        self._screen = screen
        self._inbox = inbox
        self._keep_fds = () if lock_fd is None else (lock_fd,)
        self._children: list[Child] = []
        # A path of our own; -I -S: the guardian needs no site-packages.
        self._guardian = subprocess.Popen(  # noqa: S603
            (sys.executable, "-I", "-S", guardian.__file__, str(GUARDIAN_GRACE_S)),
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def start(self, parts: Sequence[Part], limit_s: float) -> None:
        """Start the parts together and return when all are ready.

        Raises:
            PartDied: one ended first.
            PartNotReady: `limit_s` passed.
            StopRequested: a signal came.
        """
        children = []
        for part in parts:
            child = Child(part, self._data_dir.log_path(part.name), self._keep_fds)
            self._children.append(child)
            children.append(child)
            self._screen.begin(part.name, "starting")
            self._spawn(child)
        deadline_s = time.monotonic() + limit_s
        waiting = children
        while waiting:
            waiting = [child for child in waiting if not self._settle(child, deadline_s, limit_s)]
            if waiting:
                self.pause(POLL_S)

    def pause(self, timeout_s: float) -> None:
        """Wait for a signal or `timeout_s`.

        Raises:
            StopRequested: a signal to stop came.
        """
        self._inbox.wait(timeout_s)
        if self._inbox.num_stop_requests:
            raise StopRequested

    def add(self, parts: Sequence[Part]) -> None:
        """Know parts that nobody wants yet."""
        for part in parts:
            child = Child(part, self._data_dir.log_path(part.name), self._keep_fds)
            child.is_wanted = False
            self._children.append(child)

    def want(self, names: Collection[str], *, is_wanted: bool) -> None:
        """From the next look on these parts run, or end."""
        for child in self._named(names):
            child.is_wanted = is_wanted

    def are_ready(self, names: Collection[str]) -> bool:
        """Each of them runs and said so in its present life."""
        return all(child.check_ready() for child in self._named(names))

    def is_drained(self) -> bool:
        """One of the parts is down for good, or on the way, by an order from outside. Reads their logs."""
        return any(
            child.is_down or (child.process is not None and child.part.stays_down(child))
            for child in self._children
        )

    def num_bytes(self, names: Collection[str]) -> int:
        """Memory that their processes take."""
        return sum(child.num_bytes for child in self._named(names))

    def watch(self, on_look: Callable[[float], None] = lambda _: None) -> None:
        """Restart what dies until a signal to stop comes; `on_look` gets the time before each look."""
        while not self._inbox.num_stop_requests:
            now_s = time.monotonic()
            on_look(now_s)
            for child in self._children:
                self._look_after(child, now_s)
                child.trim_log()
            self._inbox.wait(POLL_S * 5)

    def _named(self, names: Collection[str]) -> list[Child]:
        return [child for child in self._children if child.part.name in names]

    def stop(self) -> None:
        """End all children by rank, each rank within its drain limit; a second signal hurries."""
        ordered = sorted(self._children, key=lambda child: child.part.stop_rank)
        for _, group in groupby(ordered, key=lambda child: child.part.stop_rank):
            self._end([child for child in group if child.process is not None])
        self._children.clear()
        if self._guardian.stdin is not None:
            self._guardian.stdin.close()
        self._guardian.wait()

    def _settle(self, child: Child, deadline_s: float, limit_s: float) -> bool:
        name = child.part.name
        if child.check_ready():
            self._screen.end(name, "ready")
            return True
        if not child.is_running:
            tail = child.tail()
            raise PartDied(name, self._reap(child), child.log_path, tail)
        if time.monotonic() > deadline_s:
            raise PartNotReady(name, limit_s, child.log_path, child.tail())
        return False

    def _look_after(self, child: Child, now_s: float) -> None:
        name = child.part.name
        if child.is_down:
            return
        if not child.is_wanted or child.told_to_end_s is not None:
            self._let_go(child, now_s)
        elif child.process is None:
            if now_s >= child.restart_at_s:
                self._spawn(child)
        elif not child.is_running:
            exit_code = self._bury(child)
            if exit_code is None:
                return
            delay_s = child.backoff.next_delay_s(now_s - child.started_s)
            child.restart_at_s = now_s + delay_s
            self._screen.say(
                f"{name} ended ({_in_words(exit_code)}); it is started again in {delay_s:g} s; "
                f"log: {child.log_path}"
            )
        elif not child.was_ready and child.check_ready():
            self._screen.say(f"{name} is ready again")

    def _let_go(self, child: Child, now_s: float) -> None:
        if child.process is None:
            return
        if not child.is_running:
            child.restart_at_s = 0.0
            if self._bury(child) is not None:
                self._screen.say(f"{child.part.name} has made room")
        elif child.told_to_end_s is None:
            child.told_to_end_s = now_s
            child.signal_group(signal.SIGTERM)
        elif now_s - child.told_to_end_s > child.part.drain_s:
            child.signal_group(signal.SIGKILL)

    def _bury(self, child: Child) -> int | None:
        """Reap one that ended under watch; returns the exit code, or None if it stays down."""
        child.is_down = child.part.stays_down(child)
        exit_code = self._reap(child)
        if not child.is_down:
            return exit_code
        self._screen.say(f"{child.part.name} was drained; it is down until serve is started again")
        return None

    def _spawn(self, child: Child) -> None:
        self._tell_guardian(child.spawn())

    def _reap(self, child: Child) -> int:
        pid = child.process.pid if child.process is not None else 0
        exit_code = child.reap()
        self._tell_guardian(-pid)
        return exit_code

    def _tell_guardian(self, signed_pid: int) -> None:
        if self._guardian.stdin is not None and self._guardian.poll() is None:
            self._guardian.stdin.write(b"%d\n" % signed_pid)
            self._guardian.stdin.flush()

    def _end(self, children: list[Child]) -> None:
        began_s = time.monotonic()
        for child in children:
            self._screen.begin(child.part.name, "stopping")
            child.signal_group(signal.SIGTERM)
        while children:
            children = [
                child
                for child in children
                if not self._has_ended(child, time.monotonic() - began_s)
            ]
            if children:
                self._inbox.wait(POLL_S)

    def _has_ended(self, child: Child, elapsed_s: float) -> bool:
        is_hurried = self._inbox.num_stop_requests > 1
        limit_s = min(child.part.drain_s, HURRY_S) if is_hurried else child.part.drain_s
        if child.is_running and elapsed_s > limit_s:
            child.signal_group(signal.SIGKILL)
        elif child.is_running:
            return False
        exit_code = self._reap(child)
        self._screen.end(child.part.name, f"stopped ({_in_words(exit_code)})")
        return True


def _in_words(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
