"""What the doctor says of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cli.doctor import State, examine, worker_threads

# More than any other worker on this machine has, so that theirs do not matter.
MANY = 100_000


@pytest.fixture
def pretended_worker() -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like a worker with very many threads, and waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()", "-m", "workers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": str(MANY)},
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


@pytest.mark.usefixtures("pretended_worker")
def test_more_threads_of_workers_than_cores_are_warned_of(tmp_path: Path) -> None:
    finding = next(each for each in examine(tmp_path, "127.0.0.1", 0) if each.name == "threads")

    assert finding.state is State.BETTER
    assert f"threads on {len(os.sched_getaffinity(0))} cores" in finding.remedy
    assert "--threads" in finding.remedy


def test_only_running_workers_are_counted(
    pretended_worker: subprocess.Popen[bytes],
) -> None:
    assert MANY in worker_threads(num_cores=2)

    pretended_worker.kill()
    pretended_worker.wait()

    assert MANY not in worker_threads(num_cores=2)
