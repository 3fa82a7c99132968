"""One supervised process: how it is started, asked whether it is ready, and ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from pipeline.cli import leash
from pipeline.cli.backoff import Backoff

TAIL_BYTES = 4000
# A log that grew past this is moved aside, one of them is kept.
LOG_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Part:
    """What a supervisor needs to know about one process.

    `env` is the whole environment. `is_ready` is asked often and answers at once; it gets the
    child. Parts of a lower `stop_rank` end first, parts of the same rank together, each within
    `drain_s` seconds of SIGTERM. One that ended and `stays_down` is not started again.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    is_ready: Callable[[Child], bool]
    stop_rank: int
    drain_s: float = 10.0
    stays_down: Callable[[Child], bool] = lambda _: False


@dataclass(slots=True)
class Child:
    """A part and the process that runs it now. One that is not wanted is ended and not started again.

    One that was told to end (at `told_to_end_s`) ends, also if it is wanted again meanwhile.
    """

    part: Part
    log_path: Path
    keep_fds: tuple[int, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    restart_at_s: float = 0.0
    was_ready: bool = False
    is_down: bool = False
    is_wanted: bool = True
    told_to_end_s: float | None = None
    backoff: Backoff = field(default_factory=Backoff)
    _log_start_bytes: int = 0

    def spawn(self) -> int:
        """Start the process in a group of its own, on a leash; returns its pid.

        Must be called from the main thread: the parent-death signal follows the thread that forked.
        """
        self.trim_log()
        with self.log_path.open("ab") as log:
            self.log_path.chmod(0o600)
            self._log_start_bytes = log.seek(0, os.SEEK_END)
            # The arguments come from our own code; -I -S: the leash needs no site-packages.
            self.process = subprocess.Popen(  # noqa: S603
                (
                    *(sys.executable, "-I", "-S", leash.__file__, str(os.getpid())),
                    *self.part.command,
                ),
                env=dict(self.part.env),
                cwd="/",  # nothing depends on where the operator stands
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                umask=0o077,  # logs, sockets, Flower's database: their owner's only
                pass_fds=self.keep_fds,
            )
        self.started_s = time.monotonic()
        self.was_ready = False
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """True while the process lives."""
        return self.process is not None and self.process.poll() is None

    def check_ready(self) -> bool:
        """True while it runs and said so in this life; asked again only until it did."""
        if not self.was_ready and self.is_running:
            self.was_ready = self.part.is_ready(self)
        return self.is_running and self.was_ready

    def log_of_this_life(self) -> bytes:
        """What the process wrote since it was started, as far as it was not moved aside."""
        with self.log_path.open("rb") as log:
            if log.seek(0, os.SEEK_END) >= self._log_start_bytes:
                log.seek(self._log_start_bytes)
            else:
                log.seek(0)  # somebody emptied it
            return log.read()

    def trim_log(self, limit_bytes: int = LOG_BYTES) -> None:
        """Move a long log aside. The process goes on writing to the same file, which is emptied.

        What it writes in that moment is lost. One that was told to leave keeps its last words.
        """
        try:
            is_long = self.log_path.stat().st_size > limit_bytes
        except FileNotFoundError:
            return
        if is_long and not (self.is_running and self.part.stays_down(self)):
            shutil.copy(self.log_path, self.log_path.with_suffix(".log.1"))
            os.truncate(self.log_path, 0)
            self._log_start_bytes = 0

    def tail(self, num_lines: int = 20) -> str:
        """The last lines of this life's log."""
        text = self.log_of_this_life()[-TAIL_BYTES:].decode(errors="replace")
        return "\n".join(text.splitlines()[-num_lines:]) or "(nothing was written)"

    @property
    def num_bytes(self) -> int:
        """Memory that would be free without the process: what it shares with others does not count."""
        if self.process is None:
            return 0
        try:
            memory = psutil.Process(self.process.pid).memory_info()
        except psutil.Error:
            return 0
        return max(0, int(memory.rss - memory.shared))

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the process and what it started."""
        if self.process is not None:
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                return

    def reap(self) -> int:
        """Forget a process that ended, and end what it left in its group; returns the exit code."""
        if self.process is None:
            return 0
        exit_code = self.process.wait()
        self.signal_group(signal.SIGKILL)
        self.process = None
        self.told_to_end_s = None
        return exit_code


def log_says(event: str) -> Callable[[Child], bool]:
    """Ready when the event's name stands in the log of this life."""
    needle = event.encode()
    return lambda child: needle in child.log_of_this_life()
