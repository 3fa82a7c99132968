"""The slab file against plain system calls on the same file, and the time of a header scan.

    python tests/bench/nvme.py [--folder DIR] [--file-bytes 1073741824] [--block-bytes 1048576 ...]

Both ways move the same bytes of the same file with the same number of threads, in the slab's order
of slots; the two alternate, and the median of the pairs' ratios counts. "slab" is what kvd calls:
headers and checksums included. "plain" is one pwrite or pread of a unit's payload. The file is
opened with O_DIRECT where that is possible, else the page cache is dropped before each read.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from tiering.block_stamp import BlockStamp
from tiering.kvd.nvme_tier import NUM_IO_THREADS, NvmeTier
from tiering.stores.block_store import payload_checksum
from tiering.stores.nvme_slab import UNIT_BYTES, NvmeSlab
from tiering.stores.slab_file import aligned_array
from tiering.stores.slot_header import pack_header

MIN_SHARE_OF_PLAIN = 0.9
MAX_SCAN_S = 2.0
SCAN_SLOTS = 10_000
SCAN_BLOCK_BYTES = 1 << 20


def say(line: str) -> None:
    """Print one line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Moves:
    """Sequential reads and writes of a whole slab file, both ways."""

    def __init__(self, path: Path, file_bytes: int, block_bytes: int) -> None:
        self.slab = NvmeSlab(path, file_bytes)
        self.slab.lay_out(block_bytes)
        slots, slot_bytes = self.slab.unit_slots, self.slab.slot_bytes
        rng = np.random.default_rng(1)
        self.blocks = aligned_array(slots * slot_bytes).reshape(slots, slot_bytes)
        self.blocks[:] = rng.integers(0, 256, self.blocks.shape, dtype=np.uint8)
        self.checksums = [payload_checksum(block[:block_bytes]) for block in self.blocks]
        self.block_bytes = block_bytes
        self.stamps = [self._stamps_of(unit) for unit in range(self.slab.num_units)]
        self.room = [
            aligned_array(slots * slot_bytes).reshape(slots, slot_bytes)
            for _ in range(NUM_IO_THREADS)
        ]
        self.fd = os.open(path, os.O_RDWR | (os.O_DIRECT if self.slab.is_direct else 0))
        self.threads = ThreadPoolExecutor(NUM_IO_THREADS)

    @property
    def num_bytes(self) -> int:
        """Payload of all units."""
        return self.slab.num_slots * self.slab.slot_bytes

    def _stamps_of(self, unit: int) -> list[BlockStamp]:
        first = unit * self.slab.unit_slots
        return [
            BlockStamp((first + i).to_bytes(16, "big"), 1, 16, self.block_bytes, checksum)
            for i, checksum in enumerate(self.checksums)
        ]

    def slab_write(self, unit: int, thread: int) -> None:
        """One unit as kvd writes it, its source verified."""
        for block, checksum in zip(self.blocks, self.checksums, strict=True):
            if payload_checksum(block[: self.block_bytes]) != checksum:
                raise RuntimeError("the source changed")
        self.slab.write_run(unit * self.slab.unit_slots, self.stamps[unit], list(self.blocks))

    def slab_read(self, unit: int, thread: int) -> None:
        """One unit as kvd reads it, verified."""
        first = unit * self.slab.unit_slots
        if any(self.slab.read_run(first, self.stamps[unit], list(self.room[thread]))):
            raise RuntimeError("wrong bytes")

    def plain_write(self, unit: int, thread: int) -> None:
        """The unit's payload in one system call."""
        os.pwrite(self.fd, self.blocks.data, self.slab._payload_offset(unit * self.slab.unit_slots))

    def plain_read(self, unit: int, thread: int) -> None:
        """The unit's payload in one system call."""
        offset = self.slab._payload_offset(unit * self.slab.unit_slots)
        os.preadv(self.fd, [self.room[thread].data], offset)

    def timed(self, move: Callable[[int, int], None]) -> float:
        """Seconds for all units, by all threads."""

        def share(thread: int) -> None:
            for unit in range(thread, self.slab.num_units, NUM_IO_THREADS):
                move(unit, thread)

        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        began_s = time.perf_counter()
        list(self.threads.map(share, range(NUM_IO_THREADS)))
        return time.perf_counter() - began_s

    def close(self) -> None:
        """Let go of the file."""
        self.threads.shutdown()
        os.close(self.fd)
        self.slab.close()


def compare(path: Path, file_bytes: int, block_bytes: int, num_rounds: int) -> list[str]:
    """Print both ways; returns what is too slow."""
    moves = Moves(path, file_bytes, block_bytes)
    faults = []
    moves.timed(moves.plain_write)  # the file's first writes are slower than all others
    for name, plain, slab in (
        ("write", moves.plain_write, moves.slab_write),
        ("read", moves.plain_read, moves.slab_read),
    ):
        moves.timed(moves.slab_write)
        plain_s: list[float] = []
        slab_s: list[float] = []
        for number in range(num_rounds):
            ways = [(plain_s, plain), (slab_s, slab)]
            for taken, move in ways if number % 2 else reversed(ways):
                taken.append(moves.timed(move))
        share = statistics.median(p / s for p, s in zip(plain_s, slab_s, strict=True))
        rates = [moves.num_bytes / statistics.median(t) / 1e9 for t in (plain_s, slab_s)]
        say(
            f"block {block_bytes >> 10:>6} KiB, unit {moves.slab.unit_slots:>3} slots, {name:<5} "
            f"plain {rates[0]:.2f} GB/s, slab {rates[1]:.2f} GB/s, share {share:.2f}"
        )
        if share < MIN_SHARE_OF_PLAIN:
            faults.append(f"{name} of {block_bytes} bytes at {share:.2f} of plain")
    moves.close()
    return faults


def write_headers(slab: NvmeSlab) -> None:
    """Headers of full units without their payload, which a scan does not read."""
    for unit in range(slab.num_units):
        first = unit * slab.unit_slots
        entries = [
            pack_header(
                slab._store_id,
                slot,
                BlockStamp(slot.to_bytes(16, "big"), slot + 1, 16, SCAN_BLOCK_BYTES, 7),
            )
            for slot in range(first, first + slab.unit_slots)
        ]
        slab._change_table(unit, 0, b"".join(entries))


async def scan(path: Path) -> list[str]:
    """Print how long a restart takes; returns what is too slow."""
    unit_slots = UNIT_BYTES // SCAN_BLOCK_BYTES
    file_bytes = 4096 + SCAN_SLOTS // unit_slots * (UNIT_BYTES + 4096)
    slab = NvmeSlab(path, file_bytes)
    slab.lay_out(SCAN_BLOCK_BYTES)
    write_headers(slab)
    slab.close()
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    began_s = time.perf_counter()
    tier = NvmeTier(NvmeSlab(path, file_bytes))
    await tier.recover()
    took_s = time.perf_counter() - began_s
    say(f"scan of {tier.num_used} slots of {SCAN_BLOCK_BYTES >> 10} KiB: {took_s:.2f} s")
    num_found = tier.num_used
    tier.close()
    if num_found != SCAN_SLOTS or took_s > MAX_SCAN_S:
        return [f"scan found {num_found} slots in {took_s:.2f} s"]
    return []


def run(folder: Path, options: argparse.Namespace) -> int:
    """All comparisons, then the scan."""
    faults: list[str] = []
    sizes: Sequence[int] = options.block_bytes
    for block_bytes in sizes:
        faults += compare(folder / "slab", options.file_bytes, block_bytes, options.rounds)
    (folder / "slab").unlink()
    faults += asyncio.run(scan(folder / "scan"))
    for fault in faults:
        say(f"FAILED {fault}")
    return int(bool(faults))


def main() -> int:
    """Exit status 1 when the slab is slower than it may be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to be measured")
    parser.add_argument("--file-bytes", type=int, default=512 << 20)
    sizes = [360 << 10, 1 << 20, 4 << 20]
    parser.add_argument("--block-bytes", type=int, nargs="+", default=sizes)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="pointsman-nvme-") as folder:
        return run(Path(folder), options)


if __name__ == "__main__":
    sys.exit(main())
