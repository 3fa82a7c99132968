"""Many streams at once through one gateway: memory of each process while they run.

Run: python -m tests.bench.streams [--streams 2000] [--tokens 40] [--token-ms 1000]
A real gateway, Redis and a worker of the script engine on loopback; the clients share the machine.
Every stream is counted to its last token. Memory is flat if it does not grow between a quarter of
the run, when all streams have their tokens, and its end.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.flow.rig import Rig
from tests.flow.talk import body
from tests.flow.wire import COMPLETIONS, post_bytes, script, write_book

MIB = 2**20
CONNECTS_AT_ONCE = 64
NUM_FILES = 16_384


class Crowd:
    """All clients: each reads its stream to the end."""

    def __init__(self, port: int, num_tokens: int) -> None:
        self._port = port
        self._request = post_bytes(
            COMPLETIONS,
            body("[[on]]", max_tokens=num_tokens, stream=True),
            "Connection: close",
        )
        self._connecting = asyncio.Semaphore(CONNECTS_AT_ONCE)
        self.num_begun = self.num_events = self.num_whole = 0

    async def stream(self) -> None:
        """One client."""
        async with self._connecting:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(self._request)
        is_first, tail = True, b""
        while data := await reader.read(65536):
            if is_first and b"data: {" in data:
                is_first = False
                self.num_begun += 1
            # An event cut in two by the network is counted with its second half.
            text = tail + data
            self.num_events += text.count(b"data: {") - tail.count(b"data: {")
            tail = text[-7:]
            self.num_whole += b'"finish_reason":"length"' in data
        writer.close()


def memory_mib(rig: Rig) -> dict[str, float]:
    """Resident memory of each process."""
    pids = {name: process.pid for name, process in rig.processes.items()}
    if rig.redis_server.pid is not None:
        pids["redis"] = rig.redis_server.pid
    return {name: psutil.Process(pid).memory_info().rss / MIB for name, pid in pids.items()}


async def run(rig: Rig, num_streams: int, num_tokens: int) -> None:
    """Start all, look at memory every second, say what was seen."""
    crowd = Crowd(rig.port, num_tokens)
    began_s = time.monotonic()
    rows = [(0.0, 0, memory_mib(rig))]
    streams = asyncio.gather(*(crowd.stream() for _ in range(num_streams)))
    while not streams.done():
        await asyncio.wait([streams], timeout=2)
        rows.append((time.monotonic() - began_s, crowd.num_begun, memory_mib(rig)))
        shown = "  ".join(f"{name} {mib:6.1f}" for name, mib in rows[-1][2].items())
        sys.stdout.write(f"{rows[-1][0]:6.1f} s  {crowd.num_begun:5} begun  MiB: {shown}\n")
        sys.stdout.flush()
    await streams
    took_s = time.monotonic() - began_s
    sys.stdout.write(
        f"{num_streams} streams of {num_tokens} tokens in {took_s:.1f} s, "
        f"{crowd.num_whole} whole, {crowd.num_events} events\n"
    )
    running = [row for row in rows if row[1] == num_streams]
    for name in rows[0][2]:
        series = [row[2][name] for row in running[len(running) // 4 :]] or [rows[-1][2][name]]
        sys.stdout.write(
            f"{name:10} before {rows[0][2][name]:6.1f} MiB, all running {series[0]:6.1f}, "
            f"end {series[-1]:6.1f}, most {max(series):6.1f}\n"
        )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--token-ms", type=int, default=1000)
    options = parser.parse_args()
    resource.setrlimit(
        resource.RLIMIT_NOFILE,
        (min(NUM_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2,
    )
    with tempfile.TemporaryDirectory() as folder:
        pieces = script("on ", ends=False, token_delay_ms=options.token_ms)
        book = write_book(Path(folder), {"on": pieces}, context_tokens=4096)
        env = {
            "POINTSMAN_WORKER_MAX_BATCH_SEQUENCES": str(options.streams),
            "POINTSMAN_WORKER_MAX_BATCH_TOKENS": str(max(2048, 2 * options.streams)),
            "POINTSMAN_WORKER_NUM_BLOCKS": str(8 * options.streams),
            # A step takes as long as a token here: with few a step the streams would begin for minutes.
            "POINTSMAN_WORKER_MAX_WAITING": "256",
        }
        rig = Rig(Path(folder), engine="script", model=book, workers={"both-0": "both"}, env=env)
        try:
            rig.start()
            asyncio.run(run(rig, options.streams, options.tokens))
            rig.wait_at_rest(30)
        finally:
            rig.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
