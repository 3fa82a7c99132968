"""Measures a large batch on the digest engine: `python tests/bench/batches.py --kills 3 --ratio`.

Prints, a line each: seconds from the upload to the end of validation and the gateway's growth; lines
per second to the end, with what was killed on the way, and the CPU time that a line costs each part;
that each line came out once; and, with `--ratio`, lines per second of another batch over those of the
engine alone in this process, given the same lines by the same window. There each step takes
`--step-ms`, as it would on a GPU. The last line holds each figure against its goal; the exit status
is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from openai.types import Batch  # noqa: E402 (needs the path above)

from pipeline.batch.slots import FILL_FACTOR  # noqa: E402
from pipeline.protocol.sampling import SamplingParams  # noqa: E402
from tests.flow.batches import ENDPOINT, OVER, order, sdk  # noqa: E402
from tests.flow.rig import Rig  # noqa: E402
from workers.kv_jobs import NoCache  # noqa: E402
from workers.models.load import load_runner  # noqa: E402
from workers.sequence import Sequence  # noqa: E402
from workers.settings import WorkerSettings  # noqa: E402
from workers.step_loop import Engine  # noqa: E402

MIB = 1 << 20
LINES_PER_TOPIC = 50
REPORT_S = 15.0
RATIO_TOKENS = 32
MAX_ACCEPT_S, MAX_GROWTH_MIB, MIN_RATIO = 30.0, 200.0, 0.8


def prompt_of(number: int) -> str:
    """Some 350 bytes; every 50 share a prefix."""
    return f"topic {number // LINES_PER_TOPIC:05d} " + "context " * 40 + f"question {number}"


def line(number: int, max_tokens: int) -> str:
    """A request of a batch."""
    body = {
        "model": "m",
        "prompt": prompt_of(number),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": ENDPOINT, "body": body})


@dataclass
class Figures:
    """What one batch came to. Times in s.

    window: the most requests that might be open at any time; a worker that was killed and its
    successor both count until the lease of the first is over.
    """

    accepted_s: float = 0.0
    growth_mib: float = 0.0
    most_open: int = 0
    window: int = 0
    lines_per_s: float = 0.0

    def verdict(self, ratio: float | None) -> dict[str, bool]:
        """Goal -> met."""
        goals = {
            f"accepted in {MAX_ACCEPT_S:.0f} s": self.accepted_s < MAX_ACCEPT_S,
            f"gateway grows less than {MAX_GROWTH_MIB:.0f} MiB": self.growth_mib < MAX_GROWTH_MIB,
            "never more than the window open": self.most_open <= self.window,
            "every line once": True,  # else it has ended
        }
        if ratio is not None:
            goals[f"{MIN_RATIO} of the engine alone"] = ratio >= MIN_RATIO
        return goals


class CpuMeter:
    """CPU seconds of the parts of a rig, over their deaths."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._spent: dict[str, float] = dict.fromkeys(rig.processes, 0.0)
        self._began = {name: self._now(name) for name in rig.processes}

    def _now(self, name: str) -> float:
        times = psutil.Process(self._rig.processes[name].pid).cpu_times()
        return float(times.user + times.system)

    def note_death(self, name: str) -> None:
        """To be called before a part is killed; the next one starts at zero."""
        self._spent[name] += self._now(name) - self._began[name]
        self._began[name] = 0.0

    def ms_per_line(self, num_lines: int) -> dict[str, float]:
        """By part."""
        return {
            name: round(1000 * (spent + self._now(name) - self._began[name]) / num_lines, 2)
            for name, spent in self._spent.items()
        }


def say(what: str, **figures: object) -> None:
    """One line of the report."""
    print(what, json.dumps(figures), flush=True)  # noqa: T201 (a report)


class BatchRun:
    """One batch from its upload to its end, with parts of the pipeline killed on the way."""

    def __init__(self, rig: Rig, num_lines: int, max_tokens: int) -> None:
        self._rig = rig
        self._num_lines = num_lines
        self._max_tokens = max_tokens
        self._client = sdk(rig).with_options(max_retries=8)
        self._rss_before = self._rss()
        self._peak = self._rss_before
        self._cpu = CpuMeter(rig)
        self._figures = Figures(window=self._window())

    def _window(self) -> int:
        """As it follows from the places of the workers that decode."""
        beats = self._rig.redis.hvals("workers")
        states = [json.loads(msgpack.unpackb(beat)[1]) for beat in beats]
        places = sum(state["capacity"] for state in states if state["role"] != "prefill")
        return FILL_FACTOR * int(places)

    def _rss(self) -> int:
        return int(psutil.Process(self._rig.processes["gateway"].pid).memory_info().rss)

    def _look(self, batch_id: str) -> Batch:
        self._peak = max(self._peak, self._rss())
        return self._client.batches.retrieve(batch_id)

    def run(self, num_kills: int) -> Figures:
        """From the upload to the output, which is checked."""
        lines = [line(number, self._max_tokens) for number in range(self._num_lines)]
        began_s = time.monotonic()
        batch = order(self._client, lines)
        while batch.status == "validating":
            time.sleep(0.05)
            batch = self._look(batch.id)
        accepted_s = time.monotonic()
        figures = self._figures
        figures.accepted_s = round(accepted_s - began_s, 2)
        say("accepted", lines=self._num_lines, seconds=figures.accepted_s)
        batch = self._wait(batch, num_kills)
        figures.lines_per_s = round(self._num_lines / (time.monotonic() - accepted_s), 1)
        figures.growth_mib = round((self._peak - self._rss_before) / MIB, 1)
        say(
            str(batch.status),
            counts=batch.request_counts.to_dict() if batch.request_counts else None,
            lines_per_s=figures.lines_per_s,
            most_open_requests=figures.most_open,
            window=figures.window,
            gateway_growth_mib=figures.growth_mib,
            cpu_ms_per_line=self._cpu.ms_per_line(self._num_lines),
        )
        self._check(batch)
        return figures

    def _wait(self, batch: Batch, num_kills: int) -> Batch:
        """Until it is over: the gateway that runs it and a worker are killed in turn."""
        kills = self._kills(num_kills)
        due, report_s = next(kills, None), time.monotonic()
        while batch.status not in OVER:
            time.sleep(0.2)
            batch = self._look(batch.id)
            self._figures.window = max(self._figures.window, self._window())
            num_open = int(self._rig.redis.zcard("deadlines"))
            self._figures.most_open = max(self._figures.most_open, num_open)
            num_done = batch.request_counts.completed if batch.request_counts else 0
            if due is not None and num_done >= due[0]:
                self._kill(due[1], num_done)
                due = next(kills, None)
            if time.monotonic() - report_s > REPORT_S:
                report_s = time.monotonic()
                say("so far", done=num_done, of=self._num_lines)
        return batch

    def _kills(self, num_kills: int) -> Iterator[tuple[int, str]]:
        """(When so many lines are done, which part)."""
        parts = ["gateway", *self._rig.workers]
        total = num_kills * len(parts)
        for index, name in enumerate(itertools.islice(itertools.cycle(parts), total)):
            yield self._num_lines * (index + 1) // (total + 1), name

    def _kill(self, name: str, num_done: int) -> None:
        self._cpu.note_death(name)
        self._rig.kill(name)
        if name == "gateway":
            self._rig.start_gateway()
        else:
            self._rig.start_worker(name, self._rig.workers[name])
        say("killed and started again", part=name, at_line=num_done)

    def _check(self, batch: Batch) -> None:
        """Each line came out once, with an answer."""
        if batch.output_file_id is None or batch.error_file_id is not None:
            raise SystemExit(f"lines failed: {batch}")
        rows = self._client.files.content(batch.output_file_id).text.splitlines()
        answers = [json.loads(row) for row in rows]
        ids = {answer["custom_id"] for answer in answers}
        good = sum(answer["response"]["status_code"] == 200 for answer in answers)
        say("output", lines=len(answers), different=len(ids), good=good)
        if not len(answers) == len(ids) == good == self._num_lines:
            raise SystemExit("lines were lost, doubled or failed")


class EngineAlone:
    """The engine of a worker in this process: the next line enters when one ends."""

    def __init__(self, num_lines: int, max_tokens: int, step_ms: float) -> None:
        runner = load_runner("digest", None, step_delay_ms=step_ms)
        self._settings = WorkerSettings().engine_settings(runner.spec.layout)
        self._engine = Engine(runner, self._settings, NoCache(), self, lambda _: None)
        self._lines = iter(range(num_lines))
        self._num_left = num_lines
        self._is_over = threading.Event()
        self._sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    def run(self) -> float:
        """Lines per second."""
        self._engine.start()
        self._engine.ready.wait()
        num_lines, began_s = self._num_left, time.monotonic()
        for _ in range(2 * self._settings.max_batch_sequences):
            self._submit_next()
        self._is_over.wait()
        took_s = time.monotonic() - began_s
        self._engine.stop(0.0)
        return num_lines / took_s

    def _submit_next(self) -> None:
        number = next(self._lines, None)
        if number is not None:
            tokens = list(prompt_of(number).encode())
            self._engine.submit(
                Sequence(str(number), 1, tokens, len(tokens), self._sampling, bytes(32))
            )

    def on_admitted(self, sequence: Sequence) -> None:
        """Nothing to do."""

    def on_prefilled(self, sequence: Sequence) -> None:
        """Never: nothing is handed over."""

    def on_step(self, outputs: list[Any]) -> None:
        """Count, and let the next ones in."""
        for output in outputs:
            if output.ending is not None:
                self._num_left -= 1
                self._submit_next()
        if not self._num_left:
            self._is_over.set()


def measure(
    workers: dict[str, str], num_lines: int, max_tokens: int, step_ms: float, num_kills: int
) -> Figures:
    """A batch in a pipeline of its own."""
    env = {"POINTSMAN_WORKER_STEP_DELAY_MS": str(step_ms)}
    with tempfile.TemporaryDirectory(prefix="pointsman-bench-") as folder:
        rig = Rig(Path(folder), workers=workers, env=env)
        try:
            rig.start()
            return BatchRun(rig, num_lines, max_tokens).run(num_kills)
        finally:
            rig.close()


def measure_ratio(num_lines: int, step_ms: float) -> float:
    """Of one worker in a pipeline, over its engine alone."""
    batch = measure({"both-0": "both"}, num_lines, RATIO_TOKENS, step_ms, 0).lines_per_s
    alone = EngineAlone(num_lines, RATIO_TOKENS, step_ms).run()
    ratio = round(batch / alone, 3)
    say("ratio", batch=batch, engine_alone=round(alone, 1), of=ratio)
    return ratio


def main() -> int:
    """One or two pipelines; 0 if every goal is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--kills", type=int, default=0, help="of the gateway and of each worker")
    parser.add_argument("--ratio", action="store_true")
    parser.add_argument("--ratio-lines", type=int, default=1500)
    parser.add_argument("--step-ms", type=float, default=30.0, help="where the ratio is measured")
    asked = parser.parse_args()
    workers = {"prefill-0": "prefill", "decode-0": "decode"}
    figures = measure(workers, asked.lines, asked.tokens, 0.0, asked.kills)
    ratio = measure_ratio(asked.ratio_lines, asked.step_ms) if asked.ratio else None
    goals = figures.verdict(ratio)
    say("goals", **goals)
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
