"""Two network namespaces joined by a line of a known speed.

The kernel shapes the line (`tc`): rate by tbf, and a delay of 2 ms by netem where this kernel has it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

HERE, THERE = "10.199.77.1", "10.199.77.2"
FAST_BITS, SLOW_BITS = 1_000_000_000, 50_000_000


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True)


@dataclass
class Line:
    """Namespaces `near` and `far`; `shape` sets the speed of both ends."""

    near: str
    far: str

    def shape(self, bits_per_s: int) -> None:
        for space in (self.near, self.far):
            inside = ("ip", "netns", "exec", space, "tc", "qdisc")
            run(*inside, "del", "dev", "line", "root")
            rate = ("rate", f"{bits_per_s}bit")
            delayed = run(*inside, "add", "dev", "line", "root", "netem", "delay", "1ms", *rate)
            if delayed.returncode:
                burst = ("burst", "128kb", "latency", "200ms")
                shaped = run(*inside, "add", "dev", "line", "root", "tbf", *rate, *burst)
                if shaped.returncode:
                    pytest.skip(f"this kernel shapes no traffic: {shaped.stderr.strip()}")

    def cut(self) -> None:
        """From now on all packets are lost, without a word to either end."""
        assert run("ip", "-n", self.far, "link", "set", "line", "down").returncode == 0


@contextlib.contextmanager
def open_line() -> Iterator[Line]:
    """A line, gone in the end; the test is skipped where that is not permitted."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("network namespaces need root, ip and tc")
    made = Line(f"ptm-near-{os.getpid()}", f"ptm-far-{os.getpid()}")
    with contextlib.ExitStack() as stack:
        for space, address in ((made.near, HERE), (made.far, THERE)):
            added = run("ip", "netns", "add", space)
            if added.returncode:
                pytest.skip(f"network namespaces are not permitted here: {added.stderr.strip()}")
            stack.callback(run, "ip", "netns", "del", space)
            if space == made.near:
                continue
            ends = ("type", "veth", "peer", "name", "line", "netns", made.far)
            joined = run("ip", "-n", made.near, "link", "add", "line", *ends)
            if joined.returncode:
                pytest.skip(f"virtual lines are not permitted here: {joined.stderr.strip()}")
            for end, its in ((made.near, HERE), (made.far, address)):
                run("ip", "-n", end, "addr", "add", f"{its}/24", "dev", "line")
                run("ip", "-n", end, "link", "set", "line", "up")
                run("ip", "-n", end, "link", "set", "lo", "up")
        yield made
