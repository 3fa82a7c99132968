"""What those who are let in feel under ten times the load, and what those who are not.

Run: python -m tests.bench.overload [--seconds 60] [--times 10] [--max-waiting 4]
A real gateway, Redis, cache daemon, prefill and decode worker of the digest engine on loopback. First
the throughput of a closed loop is measured; then requests come at 80 % of it, then at so many times
it, whether or not there is an answer to the ones before. They come as users do, independently of each
other (a Poisson process from a seed): evenly spaced ones would never meet a queue at 80 %.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from tests.flow.rig import Rig
from tests.flow.talk import body, client

MIB = 2**20
NUM_PLACES = 8
NUM_TOKENS = 20
STEP_MS = 20
WARM_UP_S = 6.0
CALM_S = 60.0
SEED = 5


@dataclass
class Seen:
    """Statuses, times to the first token of those let in, times to the answer of those refused."""

    statuses: Counter[int] = field(default_factory=Counter)
    ttft_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    lacks_retry_after: int = 0
    num_cut: int = 0

    def tell(self, what: str) -> None:
        """A line."""
        sys.stdout.write(
            f"{what:14} {dict(self.statuses)}  TTFT p50 {1000 * at(self.ttft_s, 0.5):.0f} ms, "
            f"p95 {1000 * at(self.ttft_s, 0.95):.0f} ms; refused p95 "
            f"{1000 * at(self.refused_s, 0.95):.0f} ms, longest {1000 * at(self.refused_s, 1.0):.0f} ms; "
            f"without Retry-After {self.lacks_retry_after}, cut {self.num_cut}\n"
        )
        sys.stdout.flush()


def at(times_s: list[float], share: float) -> float:
    """A percentile; 0 of nothing."""
    ranked = sorted(times_s) or [0.0]
    return ranked[int(share * (len(ranked) - 1))]


async def ask(http: httpx.AsyncClient, number: int, seen: Seen) -> None:
    """One streamed request, to its end."""
    fields = body(f"request {number} of many", max_tokens=NUM_TOKENS, stream=True)
    began_s = time.monotonic()
    async with http.stream("POST", "/v1/completions", json=fields) as answer:
        seen.statuses[answer.status_code] += 1
        if answer.status_code != httpx.codes.OK:
            seen.refused_s.append(time.monotonic() - began_s)
            seen.lacks_retry_after += "Retry-After" not in answer.headers
            return
        is_first, is_whole = True, False
        async for line in answer.aiter_lines():
            if is_first and line.startswith("data: {"):
                seen.ttft_s.append(time.monotonic() - began_s)
                is_first = False
            is_whole = is_whole or line == "data: [DONE]"
        seen.num_cut += not is_whole


async def closed_loop(http: httpx.AsyncClient) -> float:
    """Requests a second when as many are under way as there are places."""
    until_s, num_done = time.monotonic() + WARM_UP_S, 0

    async def caller(number: int) -> None:
        nonlocal num_done
        while time.monotonic() < until_s:
            await ask(http, number, Seen())
            num_done += 1

    await asyncio.gather(*(caller(number) for number in range(NUM_PLACES)))
    return num_done / WARM_UP_S


async def open_loop(http: httpx.AsyncClient, per_s: float, seconds: float) -> Seen:
    """Requests at a mean rate, for a time; all answers."""
    seen, tasks, dice = Seen(), [], random.Random(SEED)  # noqa: S311 - to be replayed
    due_s = began_s = time.monotonic()
    while due_s < began_s + seconds:
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        tasks.append(asyncio.create_task(ask(http, len(tasks), seen)))
        due_s += dice.expovariate(per_s)
    await asyncio.gather(*tasks)
    return seen


def memory_mib(rig: Rig) -> dict[str, int]:
    """Resident memory of each process."""
    pids = {name: process.pid for name, process in rig.processes.items()}
    return {name: psutil.Process(pid).memory_info().rss // MIB for name, pid in pids.items()}


async def run(rig: Rig, times: float, seconds: float) -> None:
    """All three, and what is left."""
    async with client(rig) as http:
        capacity = await closed_loop(http)
        sys.stdout.write(f"closed loop    {capacity:.1f} requests/s\n")
        calm = await open_loop(http, 0.8 * capacity, CALM_S)
        calm.tell("80 % load")
        before = memory_mib(rig)
        storm = await open_loop(http, times * capacity, seconds)
        storm.tell(f"{times:g} x load")
    await asyncio.to_thread(rig.wait_at_rest, 20)
    ratio = at(storm.ttft_s, 0.95) / max(at(calm.ttft_s, 0.95), 1e-9)
    sys.stdout.write(
        f"p95 TTFT of those let in: {ratio:.2f} x that at 80 %; memory MiB {before} -> "
        f"{memory_mib(rig)}; open at the end {rig.redis.zcard('deadlines')}\n"
    )


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument("--max-waiting", type=int, default=4)
    options = parser.parse_args()
    env = {
        "POINTSMAN_WORKER_STEP_DELAY_MS": str(STEP_MS),
        "POINTSMAN_WORKER_MAX_BATCH_SEQUENCES": str(NUM_PLACES),
        "POINTSMAN_MAX_WAITING": str(options.max_waiting),
    }
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(Path(folder), env=env)
        try:
            rig.start()
            asyncio.run(run(rig, options.times, options.seconds))
        finally:
            rig.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
