"""Measures a large batch on the digest engine: `python tests/bench/batches.py [lines] [tokens]`.

Prints seconds from the upload to the end of validation, the gateway's memory, lines per second through
the pipeline, and, as the ceiling, lines per second of `pointsman batch run`'s way: plain requests.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tests.flow.batches import ENDPOINT, sdk  # noqa: E402 (needs the path above)
from tests.flow.rig import Rig  # noqa: E402

MIB = 1 << 20
WINDOW = 256
CUT_S = 60.0  # the rest of a batch that takes longer is cancelled


def line(number: int, max_tokens: int) -> str:
    """A request of some 700 bytes; every 50 share a prefix."""
    prompt = f"topic {number // 50:05d} " + "context " * 40 + f"question {number}"
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    entry = {"custom_id": f"r{number}", "method": "POST", "url": ENDPOINT, "body": body}
    return json.dumps(entry)


def say(what: str, **figures: object) -> None:
    """One line of the report."""
    print(what, json.dumps(figures), flush=True)  # noqa: T201 (a report)


def measure(rig: Rig, num_lines: int, max_tokens: int) -> None:
    """One batch from its upload to its end."""
    gateway = psutil.Process(rig.processes["gateway"].pid)
    client = sdk(rig)
    data = "\n".join(line(number, max_tokens) for number in range(num_lines)).encode()
    rss_before, peak = gateway.memory_info().rss, 0
    began_s = time.monotonic()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    while batch.status == "validating":
        time.sleep(0.05)
        peak = max(peak, gateway.memory_info().rss)
        batch = client.batches.retrieve(batch.id)
    accepted_s = time.monotonic()
    say(
        "accepted",
        lines=num_lines,
        mib=round(len(data) / MIB, 1),
        seconds=round(accepted_s - began_s, 2),
        rss_growth_mib=round((peak - rss_before) / MIB, 1),
    )
    most_queued = 0
    cpu_before = cpu_s(rig)
    limit_s = accepted_s + CUT_S
    while batch.status not in ("completed", "cancelled"):
        time.sleep(0.5)
        peak = max(peak, gateway.memory_info().rss)
        most_queued = max(most_queued, int(rig.redis.zcard("deadlines")))
        batch = client.batches.retrieve(batch.id)
        if time.monotonic() > limit_s and batch.status == "in_progress":
            batch = client.batches.cancel(batch.id)
            limit_s = float("inf")
            cancelled_counts = batch.request_counts
            say("cut", counts=str(cancelled_counts), seconds=round(time.monotonic() - accepted_s))
    took_s = time.monotonic() - accepted_s
    counts = batch.request_counts
    num_done = counts.completed if counts else 0
    say(
        str(batch.status),
        completed=num_done,
        failed=counts.failed if counts else None,
        lines_per_s=round(num_done / took_s, 1),
        most_open_requests=most_queued,
        usage=batch.usage.to_dict() if batch.usage else None,
        rss_growth_mib=round((peak - rss_before) / MIB, 1),
        cpu_ms_per_line={
            name: round(1000 * (used_s - cpu_before[name]) / max(1, num_done), 2)
            for name, used_s in cpu_s(rig).items()
        },
    )


def cpu_s(rig: Rig) -> dict[str, float]:
    """CPU seconds that each process has used."""
    used = {name: psutil.Process(process.pid) for name, process in rig.processes.items()}
    return {name: sum(process.cpu_times()[:2]) for name, process in used.items()}


async def ceiling(rig: Rig, num_lines: int, max_tokens: int) -> None:
    """The same lines as plain HTTP requests, a window of them at once."""
    numbers = iter(range(num_lines))
    limits = httpx.Limits(max_connections=WINDOW)
    async with httpx.AsyncClient(base_url=rig.base_url, limits=limits, timeout=120) as http:

        async def work() -> None:
            for number in numbers:
                body = json.loads(line(number, max_tokens))["body"]
                (await http.post(ENDPOINT, json=body)).raise_for_status()

        began_s = time.monotonic()
        await asyncio.gather(*(work() for _ in range(WINDOW)))
    say("plain requests", lines_per_s=round(num_lines / (time.monotonic() - began_s), 1))


def main() -> None:
    """Run both on one pipeline."""
    num_lines = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    max_tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    with tempfile.TemporaryDirectory(prefix="pointsman-bench-") as folder:
        rig = Rig(Path(folder))
        try:
            rig.start()
            asyncio.run(ceiling(rig, min(num_lines, 1_000), max_tokens))
            measure(rig, num_lines, max_tokens)
        finally:
            rig.close()


if __name__ == "__main__":
    main()
