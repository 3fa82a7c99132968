"""What a client alone waits for: the stock `openai` client, streams of 32 tokens, one after the other.

Run: python -m tests.bench.latency [--requests 300] [--tokens 32]
A real pipeline of the digest engine on loopback, so all of the time is the pipeline's and the
client's own. Once with one worker for both roles, once with a prefill and a decode worker and KV
handed over between them. The last line is JSON: milliseconds to the first token and in all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import openai

from tests.flow.rig import Rig

WORKERS = {
    "one worker": {"both-0": "both"},
    "prefill and decode": {"prefill-0": "prefill", "decode-0": "decode"},
}
NUM_WARM_UP = 20


def stream_once(client: openai.OpenAI, number: int, num_tokens: int) -> tuple[float, float]:
    """Milliseconds to the first token and to the end.

    Raises:
        RuntimeError: not all tokens came.
    """
    began_s = time.perf_counter()
    first_s = 0.0
    stream = client.completions.create(
        model="m",
        prompt=f"request {number} of somebody who waits for each answer",
        max_tokens=num_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    count = 0
    for chunk in stream:
        if chunk.choices and not first_s:
            first_s = time.perf_counter() - began_s
        if chunk.usage is not None:
            count = chunk.usage.completion_tokens
    if count != num_tokens:
        raise RuntimeError(f"{count} tokens of {num_tokens}")
    return 1000 * first_s, 1000 * (time.perf_counter() - began_s)


def measure(workers: dict[str, str], num_requests: int, num_tokens: int) -> dict[str, float]:
    """Percentiles over requests of one client."""
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(Path(folder), workers=workers)
        try:
            rig.start()
            client = openai.OpenAI(base_url=f"{rig.base_url}/v1", api_key="none", max_retries=0)
            for number in range(NUM_WARM_UP):
                stream_once(client, -number, num_tokens)
            times = [stream_once(client, number, num_tokens) for number in range(num_requests)]
        finally:
            rig.close()
    firsts, totals = (sorted(column) for column in zip(*times, strict=True))
    return {
        "first_p50_ms": round(firsts[len(firsts) // 2], 2),
        "total_p50_ms": round(totals[len(totals) // 2], 2),
        "total_p99_ms": round(totals[int(0.99 * (len(totals) - 1))], 2),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    result: dict[str, object] = {}
    for label, workers in WORKERS.items():
        result[label] = measure(workers, options.requests, options.tokens)
        sys.stderr.write(f"{label}: {result[label]}\n")
    sys.stdout.write(json.dumps({**result, "load": round(os.getloadavg()[0], 1)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
