"""Hand-over of KV blocks between two processes of a node, against memcpy and against Redis.

    python tests/bench/handoff.py [--blocks 16] [--block-bytes 1048576] [--rounds 200]

One process writes the blocks into kvd's slab and commits, this one leases and loads them. "ids" is
the time from asking kvd for the lease to having it: after it the blocks could be used in place.
"copy" is lease.load of all blocks: copy into a pool of this process and verification of the copy;
"memcpy" copies as many bytes between two arrays of this process, after the same question to kvd;
"unchecked" copies the blocks' own bytes out of the slab into the pool: what it lacks of memcpy is the
price of small pages (see shmem_enabled in README.md), and the rest of "copy" that of the checksum.
Rounds of all ways are interleaved, so that other work on the machine hits them alike.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tiering.kvd.client import KvdClient
from tiering.stores.block_store import padded

ROOT = Path(__file__).resolve().parents[2]
MAX_IDS_S = 100e-6
MIN_SHARE_OF_MEMCPY = 0.7
_LEASES_PER_ROUND = 5


def say(line: str) -> None:
    """Print one line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def keys_of(num_blocks: int) -> list[bytes]:
    """The keys of the blocks that are handed over."""
    return [number.to_bytes(16, "big") for number in range(num_blocks)]


def prefill(socket_path: Path, num_blocks: int, block_bytes: int) -> None:
    """The other process: write the blocks and commit them."""
    client = KvdClient(socket_path, block_bytes, "prefill")
    client.connect()
    reservations = [r for r in client.reserve(keys_of(num_blocks)) if r is not None]
    for number, reservation in enumerate(reservations):
        payload = np.random.default_rng(number).integers(0, 256, block_bytes, dtype=np.uint8)
        client.write(reservation, payload, 16)
    client.commit(reservations)
    client.close()


def start_kvd(folder: Path, slab_bytes: int) -> subprocess.Popen[bytes]:
    """A daemon that answers."""
    environ = os.environ | {
        "POINTSMAN_KVD_SOCKET": str(folder / "kvd.sock"),
        "POINTSMAN_KVD_DRAM_BYTES": str(slab_bytes),
    }
    argv = [sys.executable, "-m", "tiering.kvd"]
    daemon = subprocess.Popen(argv, env=environ, cwd=ROOT, stdout=subprocess.PIPE)
    for line in daemon.stdout or ():
        if b"kvd_ready" in line:
            return daemon
    raise RuntimeError("kvd did not start")


class Ways:
    """The ways of getting `num_blocks` blocks; each returns the seconds it took."""

    def __init__(self, client: KvdClient, num_blocks: int, block_bytes: int) -> None:
        self.client = client
        self.keys = keys_of(num_blocks)
        self.pool = np.ones((num_blocks, padded(block_bytes)), dtype=np.uint8)
        self.source = np.ones((num_blocks, padded(block_bytes)), dtype=np.uint8)
        self.block_bytes = block_bytes

    def ids(self) -> float:
        """Lease the blocks, a few times over."""
        taken_s = []
        for _ in range(_LEASES_PER_ROUND):
            began_s = time.perf_counter()
            lease = self.client.acquire(self.keys)
            taken_s.append(time.perf_counter() - began_s)
            if len(lease.blocks) != len(self.keys):
                raise RuntimeError("blocks are missing")
            self.client.release(lease)
        return statistics.median(taken_s)

    def copy(self) -> float:
        """Copy leased blocks into the pool, verified."""
        lease = self.client.acquire(self.keys)
        began_s = time.perf_counter()
        for index, row in enumerate(self.pool):
            if not self.client.load(lease, index, row):
                raise RuntimeError("a block is bad")
        took_s = time.perf_counter() - began_s
        self.client.release(lease)
        return took_s

    def unchecked(self) -> float:
        """Copy leased blocks into the pool as they are."""
        lease = self.client.acquire(self.keys)
        slab = self.client._slab
        if slab is None:
            raise RuntimeError("kvd is away")
        began_s = time.perf_counter()
        for row, block in zip(self.pool, lease.blocks, strict=True):
            row[: block.num_bytes] = slab.view(block.slot)[: block.num_bytes]
        took_s = time.perf_counter() - began_s
        self.client.release(lease)
        return took_s

    def memcpy(self) -> float:
        """Copy the same number of bytes between two arrays of this process.

        Whoever has just waited for another process finds colder caches: so have both ways.
        """
        lease = self.client.acquire(self.keys)
        began_s = time.perf_counter()
        for row, block in zip(self.pool, self.source, strict=True):
            row[: self.block_bytes] = block[: self.block_bytes]
        took_s = time.perf_counter() - began_s
        self.client.release(lease)
        return took_s


def redis_ways(
    connection: Any, keys: list[bytes], payload: npt.NDArray[np.uint8]
) -> dict[str, Callable[[], float]]:
    """SET and GET of the same blocks."""

    def put() -> float:
        began_s = time.perf_counter()
        for key in keys:
            connection.set(key, payload.data)
        return time.perf_counter() - began_s

    def get() -> float:
        began_s = time.perf_counter()
        for key in keys:
            connection.get(key)
        return time.perf_counter() - began_s

    return {"redis SET": put, "redis GET": get}


def measure(ways: dict[str, Callable[[], float]], num_rounds: int) -> dict[str, float]:
    """Median seconds of each way; the slow ones get a tenth of the rounds."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(num_rounds):
        order = list(ways.items())
        # To and fro: whoever comes after a pause or after the other's bytes has the colder cache.
        for name, way in order if number % 2 else reversed(order):
            if not name.startswith("redis") or number % 10 < 2:
                samples[name].append(way())
    return {name: statistics.median(taken) for name, taken in samples.items()}


def run(options: argparse.Namespace, folder: Path) -> int:
    """Measure and judge."""
    num_blocks, block_bytes = options.blocks, options.block_bytes
    num_bytes = num_blocks * block_bytes
    daemon = start_kvd(folder, 4 * num_blocks * padded(block_bytes))
    try:
        arguments = (folder / "kvd.sock", num_blocks, block_bytes)
        writer = multiprocessing.get_context("spawn").Process(target=prefill, args=arguments)
        writer.start()
        writer.join(60)
        client = KvdClient(folder / "kvd.sock", block_bytes, "decode")
        client.connect()
        mine = Ways(client, num_blocks, block_bytes)
        ways: dict[str, Callable[[], float]] = {
            "ids": mine.ids,
            "copy": mine.copy,
            "memcpy": mine.memcpy,
            "unchecked": mine.unchecked,
        }
        medians = with_redis(ways, options, folder)
    finally:
        daemon.kill()
        daemon.wait()
    for name, taken_s in medians.items():
        say(f"{name:<10} {taken_s * 1e3:9.3f} ms {num_bytes / taken_s / 1e9:8.2f} GB/s")
    share = medians["memcpy"] / medians["copy"]
    say(f"ids {medians['ids'] * 1e3:.3f} ms (at most {MAX_IDS_S * 1e3:.1f})")
    say(f"copy at {share:.2f} of memcpy (at least {MIN_SHARE_OF_MEMCPY})")
    return int(medians["ids"] > MAX_IDS_S or share < MIN_SHARE_OF_MEMCPY)


def with_redis(
    ways: dict[str, Callable[[], float]], options: argparse.Namespace, folder: Path
) -> dict[str, float]:
    """Measure beside a Redis of our own, or without one."""
    if options.no_redis:
        return measure(ways, options.rounds)
    import redis  # noqa: PLC0415  # the bench runs without it

    from pipeline.cli.embedded_redis import EmbeddedRedis  # noqa: PLC0415

    server = EmbeddedRedis(folder / "redis", persistent=False)
    server.start()
    try:
        with redis.Redis.from_url(server.url) as connection:
            payload = np.ones(options.block_bytes, dtype=np.uint8)
            more = redis_ways(connection, keys_of(options.blocks), payload)
            return measure(ways | more, options.rounds)
    finally:
        server.stop()


def main() -> int:
    """Exit status 1 when the hand-over is slower than it may be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--no-redis", action="store_true")
    with tempfile.TemporaryDirectory() as folder:
        return run(parser.parse_args(), Path(folder))


if __name__ == "__main__":
    sys.exit(main())
