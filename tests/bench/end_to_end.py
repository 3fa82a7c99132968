"""What the whole pipeline leaves of the engine's throughput: gateway to client, over the engine alone.

`python tests/bench/end_to_end.py [--streams 32] [--tokens 64] [--rounds 3] [--threads N] [--json]`.
One worker for both roles serves streams through gateway, ledger and queue; between its rounds the
same engine with the same settings computes as many sequences in this process. Prompts are random
ids that no cache knows. The last line is JSON; its "ratio" is the median over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx
import numpy as np

from pipeline.protocol.sampling import SamplingParams
from tests.flow.rig import Rig
from workers.kv_jobs import NoCache
from workers.models.convert import convert, packaged_gguf
from workers.models.load import load_runner
from workers.sequence import Sequence, StepOutput
from workers.settings import WorkerSettings
from workers.step_loop import Engine

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pointsman-bench"
PROMPT_TOKENS, VOCAB_TOKENS = 256, 49_000
LIMIT_S = 600.0


def prompts_of(round_number: int, count: int) -> list[list[int]]:
    """Ids of one round."""
    random = np.random.default_rng(round_number)
    prompts: list[list[int]] = random.integers(20, VOCAB_TOKENS, (count, PROMPT_TOKENS)).tolist()
    return prompts


class EngineAlone:
    """The engine of a worker with the worker's own settings; also its sink."""

    def __init__(self, model: Path, num_threads: int) -> None:
        import torch  # noqa: PLC0415  # after the number of threads is set in the environment

        torch.set_num_threads(num_threads)
        runner = load_runner("torch", model, dtype="auto")
        settings = WorkerSettings().engine_settings(runner.spec.layout)
        self._engine = Engine(runner, settings, NoCache(), self, lambda _: None)
        self._engine.start()
        self._engine.ready.wait()
        self._num_left = 0
        self._done = threading.Event()

    def tokens_per_s(self, prompts: list[list[int]], num_tokens: int) -> float:
        """All at once.

        Raises:
            TimeoutError: they do not end.
            RuntimeError: tokens are missing.
        """
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        self._num_left = len(prompts)
        self._done.clear()
        began_s = time.perf_counter()
        sequences = [
            Sequence(str(number), 1, list(prompt), len(prompt), sampling, bytes(32))
            for number, prompt in enumerate(prompts)
        ]
        for sequence in sequences:
            self._engine.submit(sequence)
        if not self._done.wait(LIMIT_S):
            raise TimeoutError(f"the engine did not end within {LIMIT_S} s")
        seconds = time.perf_counter() - began_s
        count = sum(sequence.num_generated for sequence in sequences)
        if count != len(prompts) * num_tokens:
            raise RuntimeError(f"the engine gave {count} tokens")
        return count / seconds

    def on_admitted(self, sequence: Sequence) -> None:
        """See EngineSink."""

    def on_prefilled(self, sequence: Sequence) -> None:
        """See EngineSink."""

    def on_step(self, outputs: list[StepOutput]) -> None:
        """See EngineSink."""
        self._num_left -= sum(output.ending is not None for output in outputs)
        if not self._num_left:
            self._done.set()


async def stream(http: httpx.AsyncClient, prompt: list[int], num_tokens: int) -> int:
    """One stream to its end; the tokens that its usage names.

    Raises:
        RuntimeError: it ended with an error.
    """
    body: dict[str, Any] = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    count = 0
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith('data: {"error"'):
                raise RuntimeError(f"a stream ended with {line[6:300]}")
            if line.startswith("data: {") and '"usage":{' in line.replace(" ", ""):
                count = json.loads(line[6:])["usage"]["completion_tokens"]
    return count


async def piped_tokens_per_s(base_url: str, prompts: list[list[int]], num_tokens: int) -> float:
    """All streams at once, from asking to the last one's end.

    Raises:
        RuntimeError: tokens are missing.
    """
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=base_url, timeout=LIMIT_S, limits=limits) as http:
        began_s = time.perf_counter()
        counts = await asyncio.gather(*(stream(http, prompt, num_tokens) for prompt in prompts))
        seconds = time.perf_counter() - began_s
    if set(counts) != {num_tokens}:
        raise RuntimeError(f"{sum(counts)} tokens came, {len(prompts) * num_tokens} were asked for")
    return sum(counts) / seconds


def measure(rig: Rig, alone: EngineAlone, options: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens/s of both, round by round, in turns; a first round is not counted."""
    rates: dict[str, list[float]] = {"alone": [], "piped": []}
    for number in range(options.rounds + 1):
        prompts = prompts_of(2 * number, options.streams)
        others = prompts_of(2 * number + 1, options.streams)
        rates["alone"].append(alone.tokens_per_s(prompts, options.tokens))
        rates["piped"].append(asyncio.run(piped_tokens_per_s(rig.base_url, others, options.tokens)))
        rig.wait_at_rest()
        sys.stderr.write(f"round {number}: {rates['alone'][-1]:.1f}, {rates['piped'][-1]:.1f}\n")
    return {name: own[1:] for name, own in rates.items()}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, (os.cpu_count() or 1) // 2),
        help="of the engine; the rest is for gateway, Redis and client",
    )
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    CACHE.mkdir(parents=True, exist_ok=True)
    model = CACHE / "smollm2"
    convert(packaged_gguf(), model, lambda *_: None)
    alone = EngineAlone(model, options.threads)
    with tempfile.TemporaryDirectory(prefix="pointsman-bench-") as folder:
        rig = Rig(
            Path(folder),
            engine="torch",
            model=model,
            workers={"both-0": "both"},
            env={"POINTSMAN_WORKER_THREADS": str(options.threads)},
            has_kvd=False,
        )
        try:
            rig.start()
            rates = measure(rig, alone, options)
        finally:
            rig.close()
    ratios = [piped / own for piped, own in zip(rates["piped"], rates["alone"], strict=True)]
    result = {
        "load": os.getloadavg()[0],
        "threads": options.threads,
        "streams": options.streams,
        **{f"{name}_tokens_per_s": round(statistics.median(own), 1) for name, own in rates.items()},
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio": round(statistics.median(ratios), 3),
    }
    if not options.json:
        sys.stdout.write(", ".join(f"{name} {value}" for name, value in result.items()) + "\n")
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
