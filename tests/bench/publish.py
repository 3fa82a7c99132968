"""CPU per token of the token stream: worker side, Redis, and gateway side, without an engine.

Run: python tests/bench/publish.py [--streams 64 256] [--steps 200]
One step of every stream is one `TokenSink` write; a `TokenHub` follows all streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.cli.embedded_redis import EmbeddedRedis
from pipeline.ledger.admission import AdmissionLimits
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.store import connect, connect_async
from pipeline.ledger.worker_ledger import LogWrite, WorkerLedger
from pipeline.protocol.request import Request
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.stream import TokensArrived
from pipeline.protocol.tokens import TokenRecord, pack_records
from pipeline.token_stream.hub import TokenHub

STEP_S = 0.03


def redis_cpu_s(client: Any) -> float:
    info = client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def write_steps(ledger: WorkerLedger, ids: list[str], num_steps: int) -> float:
    """All streams' tokens, one step each 30 ms; CPU seconds of this thread."""
    began_s = time.thread_time()
    for step in range(num_steps):
        due_s = time.monotonic() + STEP_S
        ending = "length" if step == num_steps - 1 else ""
        data = pack_records([TokenRecord(step)], None)
        ledger.write_step("w", [LogWrite(name, 1, 4 * step, data, ending, 0) for name in ids])
        time.sleep(max(0.0, due_s - time.monotonic()))
    return time.thread_time() - began_s


async def follow(hub: TokenHub, name: str) -> int:
    count = 0
    async for event in hub.follow(name, first_index=0, num_logprobs=None):
        if isinstance(event, TokensArrived):
            count += len(event.records)
    return count


async def measure(url: str, num_streams: int, num_steps: int) -> dict[str, float]:
    """Microseconds of CPU per token on each side."""
    client = connect(url)
    connection, hub_connection = connect_async(url), connect_async(url)
    gateway = ClientLedger(connection, limits=AdmissionLimits(10**6), retention_s=60)
    ledger = WorkerLedger(client, max_attempts=3, retention_s=60)
    hub = TokenHub(hub_connection, gateway, "g", give_up_after_s=60)
    await hub.start()
    ids = [f"r{num_streams}-{number}" for number in range(num_streams)]
    for name in ids:
        request = Request(name, "m", [1], SamplingParams(max_tokens=num_steps))
        await gateway.submit(request, "q", hub.channel)
        ledger.claim(name, "w", ("q",))
    following = [asyncio.create_task(follow(hub, name)) for name in ids]
    await asyncio.sleep(0.5)
    redis_before_s, loop_before_s = redis_cpu_s(client), time.thread_time()
    worker_s = await asyncio.to_thread(write_steps, ledger, ids, num_steps)
    counts = await asyncio.gather(*following)
    gateway_s = time.thread_time() - loop_before_s
    redis_s = redis_cpu_s(client) - redis_before_s
    await hub.close()
    await connection.aclose()
    await hub_connection.aclose()
    client.close()
    if set(counts) != {num_steps}:
        raise RuntimeError(f"streams got {sorted(set(counts))} of {num_steps} tokens")
    tokens = num_streams * num_steps
    sides = {"worker_us": worker_s, "redis_us": redis_s, "gateway_us": gateway_s}
    return {side: round(seconds / tokens * 1e6, 2) for side, seconds in sides.items()}


def main(streams: Iterable[int], num_steps: int) -> None:
    """Print one line per number of streams, then JSON."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedRedis(Path(folder), persistent=False)
        server.start()
        try:
            results = {n: asyncio.run(measure(server.url, n, num_steps)) for n in streams}
        finally:
            server.stop()
    for num_streams, sides in results.items():
        sys.stdout.write(f"{num_streams:4d} streams, CPU per token: {sides}\n")
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    main(options.streams, options.steps)
