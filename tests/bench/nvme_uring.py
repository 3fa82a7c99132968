"""The slab's system calls by threads against nixl's POSIX plug-in (aio, io_uring), same file, in turns.

    python tests/bench/nvme_uring.py [--folder DIR] [--file-bytes 536870912] [--rounds 15]

Needs the extra `nixl`. All move units of 8 MiB in one random order past the page cache, four at a time:
"threads" as kvd does, one preadv or pwrite a unit on four threads; the plug-in by four transfers of a
unit that one thread has under way and asks about, whole or in pieces of 1 MiB. Payload alone, nothing
is verified. The last line has the medians of the rounds' ratios: threads' time over the plug-in's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from tiering.stores.slab_file import aligned_array

UNIT_BYTES, PIECE_BYTES, DEPTH = 8 << 20, 1 << 20, 4
PAUSE_S = 0.0001
PLUG_INS = {"aio": {"use_aio": "true"}, "io_uring": {"use_uring": "true", "use_aio": "false"}}


class Disk:
    """A preallocated file, and memory for as many units as are under way."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, num_bytes)
        self.num_bytes = num_bytes
        rng = np.random.default_rng(1)
        self.offsets = [int(n) * UNIT_BYTES for n in rng.permutation(num_bytes // UNIT_BYTES)]
        self.memory = aligned_array(DEPTH * UNIT_BYTES).reshape(DEPTH, UNIT_BYTES)
        self.memory[:] = rng.integers(0, 256, self.memory.shape, dtype=np.uint8)
        self._threads = ThreadPoolExecutor(DEPTH)

    def by_threads(self, *, is_write: bool) -> None:
        """One system call a unit."""

        def share(thread: int) -> None:
            for offset in self.offsets[thread::DEPTH]:
                if is_write:
                    os.pwrite(self.fd, self.memory[thread].data, offset)
                else:
                    os.preadv(self.fd, [self.memory[thread].data], offset)

        list(self._threads.map(share, range(DEPTH)))


class PlugIn:
    """One agent with the POSIX plug-in."""

    def __init__(self, disk: Disk, name: str) -> None:
        api: Any = importlib.import_module("nixl._api")
        self._disk = disk
        self._agent = api.nixl_agent(f"bench-{name}", api.nixl_agent_config(backends=[]))
        logging.getLogger("nixl").handlers.clear()
        self._agent.create_backend("POSIX", PLUG_INS[name])
        self._address = disk.memory.ctypes.data
        memory = [(self._address, disk.memory.nbytes, 0, "")]
        self._agent.register_memory(memory, "DRAM", ["POSIX"])
        self._agent.register_memory([(0, disk.num_bytes, disk.fd, "")], "FILE", ["POSIX"])

    def move(self, piece_bytes: int, *, is_write: bool) -> None:
        """All units, DEPTH of them under way."""
        left, free = list(self._disk.offsets), list(range(DEPTH))
        under_way: dict[int, Any] = {}
        while left or under_way:
            while left and free:
                place = free.pop()
                under_way[place] = self._start(place, left.pop(), piece_bytes, is_write=is_write)
            ended = [p for p, handle in under_way.items() if self._has_ended(handle)]
            for place in ended:
                self._agent.release_xfer_handle(under_way.pop(place))
            free += ended
            if not ended:
                time.sleep(PAUSE_S)

    def _start(self, place: int, offset: int, piece_bytes: int, *, is_write: bool) -> Any:
        agent, begin = self._agent, self._address + place * UNIT_BYTES
        pieces = range(0, UNIT_BYTES, piece_bytes)
        here = agent.get_xfer_descs([(begin + p, piece_bytes, 0) for p in pieces], "DRAM")
        rows = [(offset + p, piece_bytes, self._disk.fd) for p in pieces]
        there = agent.get_xfer_descs(rows, "FILE")
        way = "WRITE" if is_write else "READ"
        handle = agent.initialize_xfer(way, here, there, agent.name, b"", ["POSIX"])
        agent.transfer(handle)
        return handle

    def _has_ended(self, handle: Any) -> bool:
        state = self._agent.check_xfer_state(handle)
        if state not in ("PROC", "DONE"):
            raise RuntimeError(f"a transfer is {state}")
        return bool(state == "DONE")


def measure(disk: Disk, num_rounds: int) -> dict[str, float]:
    """Print every way; threads' time over that of the others."""
    ways: dict[str, Callable[..., None]] = {"threads": disk.by_threads}
    for name in PLUG_INS:
        plug_in = PlugIn(disk, name)
        for label, size in (("units", UNIT_BYTES), ("pieces", PIECE_BYTES)):

            def move(*, is_write: bool, plug_in: PlugIn = plug_in, size: int = size) -> None:
                plug_in.move(size, is_write=is_write)

            ways[f"{name} {label}"] = move
    disk.by_threads(is_write=True)  # the file's first writes are slower than all others
    ratios = {}
    for is_write in (True, False):
        taken_s: dict[str, list[float]] = {name: [] for name in ways}
        cpu_s = dict.fromkeys(ways, 0.0)
        for number in range(num_rounds):
            names = list(ways)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                ways[name](is_write=is_write)
                taken_s[name].append(time.perf_counter() - began_s)
                cpu_s[name] += time.process_time() - began_cpu_s
        for name, values in taken_s.items():
            pairs = zip(taken_s["threads"], values, strict=True)
            label = f"{'write' if is_write else 'read'} {name}"
            ratios[label] = round(statistics.median(a / b for a, b in pairs), 2)
            rate = disk.num_bytes / statistics.median(values) / 1e9
            cpu_ms = cpu_s[name] / num_rounds * 1000
            sys.stdout.write(f"{label:<22} {rate:.2f} GB/s, CPU {cpu_ms:.0f} ms a round\n")
    return ratios


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    parser.add_argument("--file-bytes", type=int, default=512 << 20)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="pointsman-uring-") as folder:
        ratios = measure(Disk(Path(folder) / "slab", options.file_bytes), options.rounds)
    sys.stdout.write(json.dumps({"ratios": ratios}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
