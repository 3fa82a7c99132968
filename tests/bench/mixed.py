"""What running streams notice of a long prompt: on one worker, with and without sized chunks, or two.

`python tests/bench/mixed.py [--threads 2] [--rounds 3] [--json]`. Eight streams decode; after a
while a prompt of 2,000 tokens arrives. For each form the gaps between a stream's tokens before it
came (quiet) and while it is computed (loud):

chunked    one worker for both, chunks sized by `max_decode_slowdown` 2
unchunked  one worker for both, the prompt in one step
separate   one worker decodes, another prefills, half of the threads each

All forms take turns in one run, so that their ratios hold on a machine that others use too. The
last line is JSON: p99 in ms, the ratio of loud to quiet, and separate over unchunked.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from pipeline.protocol.sampling import SamplingParams
from workers.kv_jobs import NoCache
from workers.models.convert import convert, packaged_gguf
from workers.models.load import load_runner
from workers.sequence import Sequence, StepOutput
from workers.settings import EngineSettings
from workers.step_loop import Engine

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pointsman-bench"
NUM_STREAMS, STREAM_TOKENS = 8, 64
PROMPT_TOKENS, VOCAB_TOKENS = 2000, 49_000
WARM_STEPS, QUIET_STEPS = 20, 100
NUM_BLOCKS = 1200
LIMIT_S = 300.0
WHOLE_PROMPT = PROMPT_TOKENS + NUM_STREAMS  # a step that holds it beside the streams
FORMS = {
    "chunked": EngineSettings(NUM_BLOCKS, max_batch_tokens=512, max_decode_slowdown=2.0),
    "unchunked": EngineSettings(NUM_BLOCKS, max_batch_tokens=WHOLE_PROMPT * 4 // 3),
    "decode": EngineSettings(NUM_BLOCKS, max_batch_tokens=512),
    "prefill": EngineSettings(NUM_BLOCKS, max_batch_tokens=WHOLE_PROMPT),
}


class Watcher:
    """The engine's sink: when each sequence's tokens came."""

    def __init__(self) -> None:
        self.times_s: dict[str, list[float]] = {}
        self._changed = threading.Condition()

    def wait_for(self, name: str, num_tokens: int) -> None:
        """Until the sequence has so many tokens."""

        def is_there() -> bool:
            return len(self.times_s.get(name, ())) >= num_tokens

        with self._changed:
            if not self._changed.wait_for(is_there, LIMIT_S):
                raise TimeoutError(f"{name} has no {num_tokens} tokens after {LIMIT_S} s")

    def on_admitted(self, sequence: Sequence) -> None:
        """See EngineSink."""

    def on_prefilled(self, sequence: Sequence) -> None:
        """See EngineSink."""

    def on_step(self, outputs: list[StepOutput]) -> None:
        """See EngineSink."""
        now_s = time.perf_counter()
        with self._changed:
            for output in outputs:
                self.times_s.setdefault(output.sequence.request_id, []).append(now_s)
            self._changed.notify_all()


class Worker:
    """An engine in this process, and what it is asked to do."""

    def __init__(self, form: str, model: Path, threads: int) -> None:
        import torch  # noqa: PLC0415  # after the number of threads is set in the environment

        torch.set_num_threads(threads)
        self._random = np.random.default_rng(threads)
        self._watcher = Watcher()
        runner = load_runner("torch", model, dtype="auto")
        self._engine = Engine(runner, FORMS[form], NoCache(), self._watcher, lambda _: None)
        self._engine.start()
        self._engine.ready.wait()
        self._num_asked = 0
        self._streams: list[str] = []

    def begin_streams(self) -> None:
        """Start the streams and let them run until they are measured quietly."""
        self._streams = [self._ask(STREAM_TOKENS, 1500) for _ in range(NUM_STREAMS)]
        for name in self._streams:
            self._watcher.wait_for(name, WARM_STEPS + QUIET_STEPS)

    def prompt(self) -> float:
        """Seconds to the first token of a long prompt."""
        began_s = time.perf_counter()
        self._watcher.wait_for(self._ask(PROMPT_TOKENS, 1), 1)
        return time.perf_counter() - began_s

    def end_streams(self) -> dict[str, list[float]]:
        """Gaps in s: of the quiet steps, and of those after them."""
        times_s = {name: list(self._watcher.times_s[name]) for name in self._streams}
        for name in self._streams:
            self._engine.cancel(name)
        whole = WARM_STEPS + QUIET_STEPS
        quiet = [np.diff(own[WARM_STEPS:whole]) for own in times_s.values()]
        loud = [np.diff(own[whole - 1 :]) for own in times_s.values()]
        return {"quiet": np.concatenate(quiet).tolist(), "loud": np.concatenate(loud).tolist()}

    def _ask(self, num_prompt: int, num_tokens: int) -> str:
        self._num_asked += 1
        name = str(self._num_asked)
        prompt = self._random.integers(20, VOCAB_TOKENS, num_prompt).tolist()
        sampling = SamplingParams(
            max_tokens=num_tokens, temperature=0.0, ignore_eos=True, uses_cache=False
        )
        self._engine.submit(Sequence(name, 1, prompt, num_prompt, sampling, b""))
        return name


def serve(pipe: Connection, form: str, model: Path, threads: int) -> None:
    """A worker process: runs the methods that it is asked for, until None."""
    worker = Worker(form, model, threads)
    methods: dict[str, Callable[[], Any]] = {
        "begin_streams": worker.begin_streams,
        "prompt": worker.prompt,
        "end_streams": worker.end_streams,
    }
    pipe.send("ready")
    while (name := pipe.recv()) is not None:
        pipe.send(methods[name]())


class Peer:
    """The parent's side of a worker process."""

    def __init__(self, form: str, model: Path, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        os.environ["OMP_NUM_THREADS"] = str(threads)
        self._process = context.Process(target=serve, args=(theirs, form, model, threads))
        self._process.start()
        self.answer()

    def ask(self, method: str) -> None:
        """Begin; `answer` waits for the end."""
        self._pipe.send(method)

    def answer(self) -> Any:
        """Of the method asked for last."""
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError("a worker does not answer")
        return self._pipe.recv()

    def call(self, method: str) -> Any:
        """Begin and wait."""
        self.ask(method)
        return self.answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()


def one_round(streams: Peer, prompts: Peer) -> dict[str, Any]:
    """Gaps of the streams on one worker around a prompt on the same or another one."""
    streams.call("begin_streams")
    first_token_s = prompts.call("prompt")
    return {**streams.call("end_streams"), "first_token_s": [first_token_s]}


def figures_of(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """p99 over all streams and rounds, in ms."""
    merged = {name: np.concatenate([own[name] for own in rounds]) for name in rounds[0]}
    quiet_ms, loud_ms = (1e3 * np.percentile(merged[name], 99) for name in ("quiet", "loud"))
    return {
        "quiet_p50_ms": round(1e3 * float(np.median(merged["quiet"])), 1),
        "quiet_p99_ms": round(float(quiet_ms), 1),
        "loud_p99_ms": round(float(loud_ms), 1),
        "ratio": round(float(loud_ms / quiet_ms), 2),
        "prompt_first_token_s": round(float(np.median(merged["first_token_s"])), 2),
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    model = CACHE / "smollm2"
    convert(packaged_gguf(), model, lambda *_: None)
    half = max(1, options.threads // 2)
    peers: dict[str, Peer] = {}
    rounds: dict[str, list[dict[str, Any]]] = {"chunked": [], "unchunked": [], "separate": []}
    try:
        for form in FORMS:
            whole = form in rounds
            peers[form] = Peer(form, model, options.threads if whole else half)
        for number in range(options.rounds):
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} round {number + 1}\n")
            for form in ("chunked", "unchunked"):
                rounds[form].append(one_round(peers[form], peers[form]))
            rounds["separate"].append(one_round(peers["decode"], peers["prefill"]))
    finally:
        for peer in peers.values():
            peer.close()
    figures = {form: figures_of(own) for form, own in rounds.items()}
    for form, own in figures.items() if not options.json else []:
        sys.stdout.write(f"{form:10} " + ", ".join(f"{k} {v}" for k, v in own.items()) + "\n")
    ratio = figures["separate"]["loud_p99_ms"] / figures["unchunked"]["loud_p99_ms"]
    result = {"load": os.getloadavg()[0], "separate_over_unchunked": round(ratio, 3), **figures}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
