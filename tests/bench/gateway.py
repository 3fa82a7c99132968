"""CPU of one gateway process per streamed token and per request, and how late its event loop runs.

Run: python tests/bench/gateway.py [--streams 1 64 256] [--tokens 200]
A real gateway, Redis and a worker of the script engine on loopback. The gateway's own CPU time is
read, so what else the machine does hardly matters; what the gateway burns at rest is taken off. The
event loop's lag is how much later than asked a timer of 5 ms fires.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gateway.app import create_app
from gateway.server import make_server
from gateway.settings import load_gateway_settings
from pipeline.settings import load_pipeline_settings
from tests.flow.rig import REPOSITORY, Rig
from tests.flow.wire import script, write_book

TIMER_S = 0.005
REST_S = 3.0
NUM_REQUESTS = 400
AT_ONCE = 16
CONTEXT_TOKENS = 4096
STEP_MS = {1: 5, 64: 10, 256: 40}  # what an engine of this batch size may take
PROBE = "/bench/probe"


def serve() -> None:
    """The gateway of the environment, with a timer that watches the loop and a route that tells."""
    app = create_app(load_gateway_settings(), load_pipeline_settings())
    late_s: list[float] = []

    async def probe() -> dict[str, float]:
        lags = sorted(late_s) or [0.0]
        late_s.clear()
        times = psutil.Process().cpu_times()
        return {
            "cpu_s": times.user + times.system,
            "now_s": time.monotonic(),
            "lag_p50_ms": 1000 * lags[len(lags) // 2],
            "lag_p99_ms": 1000 * lags[int(0.99 * (len(lags) - 1))],
        }

    async def watch() -> None:
        while True:
            due_s = time.monotonic() + TIMER_S
            await asyncio.sleep(TIMER_S)
            late_s.append(max(0.0, time.monotonic() - due_s))

    async def run() -> None:
        watching = asyncio.create_task(watch())
        await make_server(app, load_gateway_settings()).serve()
        watching.cancel()

    app.add_api_route(PROBE, probe)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


class BenchRig(Rig):
    """A pipeline whose gateway can be asked for its CPU time."""

    def start_gateway(self, name: str = "gateway", port: int | None = None) -> None:
        """The one of this file."""
        env = {
            "POINTSMAN_GATEWAY_HOST": "127.0.0.1",
            "POINTSMAN_GATEWAY_PORT": str(port or self.port),
        }
        self.spawn(name, str(Path(__file__).resolve()), "--serve", **env)


async def stream(http: httpx.AsyncClient, step_ms: int, num_tokens: int) -> int:
    """Read one stream to its end; the number of chunks with text."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": f"[[every-{step_ms}]]"}],
        "max_tokens": num_tokens,
        "stream": True,
    }
    num_chunks = 0
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for data in answer.aiter_raw():
            num_chunks += data.count(b'"content":"word')
    return num_chunks


async def ask(http: httpx.AsyncClient) -> int:
    """One whole answer of one token."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = await http.post("/v1/chat/completions", json=body)
    return int(answer.json()["usage"]["completion_tokens"])


async def measured(
    http: httpx.AsyncClient, work: Callable[[], Any], rest_cpu: float
) -> dict[str, float]:
    """Run `work`, which counts something; CPU microseconds for each of it, at rest taken off."""
    before = (await http.get(PROBE)).json()
    count = await work()
    after = (await http.get(PROBE)).json()
    wall_s = after["now_s"] - before["now_s"]
    cpu_s = after["cpu_s"] - before["cpu_s"] - rest_cpu * wall_s
    return {
        "count": count,
        "per_s": round(count / wall_s),
        "cpu_us_each": round(1e6 * cpu_s / count, 1),
        "per_core_s": round(count / cpu_s),
        "lag_p50_ms": round(after["lag_p50_ms"], 2),
        "lag_p99_ms": round(after["lag_p99_ms"], 2),
    }


async def measure(rig: Rig, counts: list[int], num_tokens: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    results: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=rig.base_url, timeout=120, limits=limits) as http:
        await asyncio.gather(*(stream(http, 5, 5) for _ in range(8)))
        before = (await http.get(PROBE)).json()
        await asyncio.sleep(REST_S)
        after = (await http.get(PROBE)).json()
        rest_cpu = (after["cpu_s"] - before["cpu_s"]) / (after["now_s"] - before["now_s"])
        results["at_rest"] = {"cpu_percent": round(100 * rest_cpu, 2)}

        for count in counts:
            step_ms = STEP_MS.get(count, 20)

            async def streams(count: int = count, step_ms: int = step_ms) -> int:
                read = (stream(http, step_ms, num_tokens) for _ in range(count))
                return sum(await asyncio.gather(*read))

            results[f"tokens of {count} streams"] = await measured(http, streams, rest_cpu)

        async def requests() -> int:
            async def some() -> int:
                return sum([await ask(http) for _ in range(NUM_REQUESTS // AT_ONCE)])

            return sum(await asyncio.gather(*(some() for _ in range(AT_ONCE))))

        results["requests"] = await measured(http, requests, rest_cpu)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    steps_ms = {STEP_MS.get(count, 20) for count in options.streams} | {5}
    book = {
        f"every-{step_ms}": script("word ", ends=False, token_delay_ms=step_ms)
        for step_ms in steps_ms
    }
    places = str(max(options.streams))
    env = {"POINTSMAN_WORKER_MAX_BATCH_SEQUENCES": places, "PYTHONPATH": os.fspath(REPOSITORY)}
    with tempfile.TemporaryDirectory() as folder:
        rig = BenchRig(
            Path(folder),
            engine="script",
            model=write_book(Path(folder), book, CONTEXT_TOKENS),
            workers={"both-0": "both"},
            env=env,
            has_kvd=False,
        )
        try:
            rig.start()
            results = asyncio.run(measure(rig, options.streams, options.tokens))
        finally:
            rig.close()
    sys.stdout.write("\n".join(f"{name}: {json.dumps(row)}" for name, row in results.items()))
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
