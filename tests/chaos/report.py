"""What became of the requests, as lines on a terminal, as JSON, and as a table in the documentation."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.flow.rig import REPOSITORY

BEGIN = "<!-- written by `make chaos`: from here -->"
END = "<!-- to here -->"


@dataclass(frozen=True)
class Outcome:
    """What one fault did to the requests that it met. Times in seconds.

    longest_pause_s: between two tokens of a stream, from the fault's beginning on. recovery_s: from the
    end of the fault to the next token of the stream that waited longest.
    """

    fault: str
    requests: int
    lost: int
    doubled: int
    changed: int
    longest_pause_s: float
    recovery_s: float
    limit_s: float | None = None
    errors: str = ""

    @property
    def is_late(self) -> bool:
        """Recovery took longer than it may."""
        return self.limit_s is not None and self.recovery_s > self.limit_s

    @property
    def is_good(self) -> bool:
        """No harm was done, and in time."""
        return self.lost == self.doubled == self.changed == 0 and not self.is_late


def show_head() -> None:
    """The names of the columns."""
    sys.stdout.write(
        f"     {'fault':<36} {'requests':>8} {'lost':>5} {'doubled':>8} {'changed':>8}"
        f" {'pause':>9} {'recovery':>9}\n"
    )


def show(outcome: Outcome) -> None:
    """One line of the table."""
    mark = "ok  " if outcome.is_good else "LATE" if outcome.is_late else "FAIL"
    sys.stdout.write(
        f"{mark} {outcome.fault:<36} {outcome.requests:>8} {outcome.lost:>5} {outcome.doubled:>8}"
        f" {outcome.changed:>8} {outcome.longest_pause_s:>7.2f} s {outcome.recovery_s:>7.2f} s"
        f"  {outcome.errors}\n"
    )
    sys.stdout.flush()


def write_json(path: Path, outcomes: Sequence[Outcome]) -> None:
    """All outcomes, one object each."""
    path.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


def around_table(path: Path) -> tuple[str, str]:
    """What stands before the table of a page, and behind it.

    Raises:
        ValueError: the page has no marks that the table goes between.
        OSError: there is no such page.
    """
    before, _, rest = path.read_text().partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{path} lacks the marks that the table goes between")
    return before, after


def write_table(path: Path, outcomes: Sequence[Outcome], command: str, took_s: float) -> None:
    """Put the table between the two marks of a Markdown page. Raises as `around_table`."""
    before, after = around_table(path)
    path.write_text(f"{before}{BEGIN}\n\n{_text(outcomes, command, took_s)}\n{END}{after}")


def _text(outcomes: Sequence[Outcome], command: str, took_s: float) -> str:
    lines = [
        f"`{command}`, {time.strftime('%Y-%m-%d')}, commit {_commit()}, {_machine()}, "
        f"{took_s / 60:.0f} minutes: {sum(o.requests for o in outcomes):,} requests, "
        f"{sum(o.lost for o in outcomes)} lost, {sum(o.doubled for o in outcomes)} doubled, "
        f"{sum(o.changed for o in outcomes)} changed.",
        "",
        "| fault | requests | lost | doubled | changed | longest pause | recovered after |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {o.fault} | {o.requests} | {o.lost} | {o.doubled} | {o.changed} | "
        f"{o.longest_pause_s:.1f} s | {o.recovery_s:.1f} s |"
        for o in outcomes
    ]
    return "\n".join(lines) + "\n"


def _commit() -> str:
    git = ["git", "-C", str(REPOSITORY)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, check=False)
    return name.stdout.decode().strip() or "unknown"


def _machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}"
