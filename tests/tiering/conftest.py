"""A real kvd process per test, and a disk that is small."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tiering.kvd.client import KvdClient

START_LIMIT_S = 30.0
STOP_LIMIT_S = 30.0
BLOCK_BYTES = 10_000  # no multiple of a page
SLOT_BYTES = 12_288


class KvdProcess:
    """`python -m tiering.kvd` on a directory; `restart` keeps the directory."""

    def __init__(self, directory: Path, *, run_in: Sequence[str] = ()) -> None:
        """`run_in`: a command that the daemon is an argument of."""
        self._run_in = run_in
        self.socket_path = directory / "kvd.sock"
        self.slab_path = directory / "slab"
        self.events: list[dict[str, Any]] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._clients: list[KvdClient] = []

    def start(
        self, *, num_dram_slots: int = 32, num_nvme_slots: int = 0, **options: object
    ) -> None:
        """Start and wait until it is ready."""
        nvme_bytes = 4096 + num_nvme_slots * (4096 + SLOT_BYTES) if num_nvme_slots else 0
        values = {
            "SOCKET": self.socket_path,
            "DRAM_BYTES": num_dram_slots * SLOT_BYTES,
            "NVME_BYTES": nvme_bytes,
            "NVME_PATH": self.slab_path,
        } | {name.upper(): value for name, value in options.items() if name != "user"}
        environ = {f"POINTSMAN_KVD_{name}": str(value) for name, value in values.items()}
        self._process = subprocess.Popen(
            [*self._run_in, sys.executable, "-m", "tiering.kvd"],
            env=os.environ | environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read_events, args=(is_ready,))
        self._reader.start()
        assert is_ready.wait(START_LIMIT_S), self.events
        assert self.find_events("kvd_ready"), self.events

    @property
    def pid(self) -> int:
        """Process id of the running daemon."""
        assert self._process is not None
        return self._process.pid

    @property
    def peer_address(self) -> str:
        """Where other daemons may pull from; started with `peer_port=0`."""
        (event,) = self.find_events("peers_may_connect")[-1:]
        return str(event["address"])

    def client(
        self, holder: str = "test", *, block_bytes: int = BLOCK_BYTES, namespace: str = ""
    ) -> KvdClient:
        """A connected holder, closed at the end of the test."""
        client = KvdClient(self.socket_path, block_bytes, holder, namespace=namespace)
        self._clients.append(client)
        client.connect()
        return client

    def find_events(self, name: str) -> list[dict[str, Any]]:
        """Log events of this name so far."""
        return [event for event in self.events if event["event"] == name]

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._end()

    def kill(self) -> int:
        """SIGKILL; returns the exit status."""
        assert self._process is not None
        self._process.kill()
        return self._end()

    def close(self) -> None:
        """End what still runs."""
        for client in self._clients:
            client.close()
        if self._process is not None:
            self.kill()

    def _end(self) -> int:
        assert self._process is not None
        assert self._reader is not None
        status = self._process.wait(STOP_LIMIT_S)
        self._reader.join(STOP_LIMIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        return status

    def _read_events(self, is_ready: threading.Event) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == "kvd_ready":
                is_ready.set()
        is_ready.set()  # it ended; the events say why


@pytest.fixture
def kvd(tmp_path: Path) -> Iterator[KvdProcess]:
    process = KvdProcess(tmp_path)
    yield process
    process.close()


@pytest.fixture
def kvds(tmp_path: Path) -> Iterator[tuple[KvdProcess, KvdProcess]]:
    """Two nodes' daemons, not started."""
    processes = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        processes.append(KvdProcess(tmp_path / name))
    yield processes[0], processes[1]
    for process in processes:
        process.close()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Look at a thing until it is so, for ten seconds at most."""

    def wait(is_so: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 10
        while not is_so():
            assert time.monotonic() < deadline_s, "did not come true in ten seconds"
            time.sleep(0.005)

    return wait


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB; skipped where this process may not mount one."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() or mount is None:
        pytest.skip("mounting a small file system needs root")
    argv = [mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory)]
    if subprocess.run(argv, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)
