"""Measures a large batch on the digest engine: `python tests/bench/batches.py --help`.

Prints, a line each: seconds from the upload to the end of validation and the gateway's growth; lines
per second to the end, with what was killed on the way; that each line came out once; and, with
`--ratio`, lines per second of a batch over those of the engine alone in this process, given the same
lines by the same window. There each step takes `--step-ms`, as it would on a GPU.
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
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from openai.types import Batch  # noqa: E402 (needs the path above)

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

    def _rss(self) -> int:
        return int(psutil.Process(self._rig.processes["gateway"].pid).memory_info().rss)

    def _look(self, batch_id: str) -> Batch:
        self._peak = max(self._peak, self._rss())
        return self._client.batches.retrieve(batch_id)

    def run(self, num_kills: int) -> float:
        """Lines per second from the end of validation to the end."""
        lines = [line(number, self._max_tokens) for number in range(self._num_lines)]
        began_s = time.monotonic()
        batch = order(self._client, lines)
        while batch.status == "validating":
            time.sleep(0.05)
            batch = self._look(batch.id)
        accepted_s = time.monotonic()
        say(
            "accepted",
            lines=self._num_lines,
            seconds=round(accepted_s - began_s, 2),
            gateway_growth_mib=round((self._peak - self._rss_before) / MIB, 1),
        )
        batch, most_open = self._wait(batch, num_kills)
        lines_per_s = self._num_lines / (time.monotonic() - accepted_s)
        say(
            str(batch.status),
            counts=batch.request_counts.to_dict() if batch.request_counts else None,
            lines_per_s=round(lines_per_s, 1),
            most_open_requests=most_open,
            gateway_growth_mib=round((self._peak - self._rss_before) / MIB, 1),
        )
        self._check(batch)
        return lines_per_s

    def _wait(self, batch: Batch, num_kills: int) -> tuple[Batch, int]:
        """Until it is over: the gateway that runs it and a worker are killed in turn."""
        kills = self._kills(num_kills)
        due, most_open, report_s = next(kills, None), 0, time.monotonic()
        while batch.status not in OVER:
            time.sleep(0.2)
            batch = self._look(batch.id)
            most_open = max(most_open, int(self._rig.redis.zcard("deadlines")))
            num_done = batch.request_counts.completed if batch.request_counts else 0
            if due is not None and num_done >= due[0]:
                self._kill(due[1], num_done)
                due = next(kills, None)
            if time.monotonic() - report_s > REPORT_S:
                report_s = time.monotonic()
                say("so far", done=num_done, of=self._num_lines)
        return batch, most_open

    def _kills(self, num_kills: int) -> Iterator[tuple[int, str]]:
        """(When so many lines are done, which part)."""
        parts = ["gateway", *self._rig.workers]
        total = num_kills * len(parts)
        for index, name in enumerate(itertools.islice(itertools.cycle(parts), total)):
            yield self._num_lines * (index + 1) // (total + 1), name

    def _kill(self, name: str, num_done: int) -> None:
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


def main() -> None:
    """One pipeline, one or two batches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--kills", type=int, default=0, help="of the gateway and of each worker")
    parser.add_argument("--ratio", action="store_true")
    parser.add_argument("--step-ms", type=float, default=0.0)
    asked = parser.parse_args()
    workers = {"both-0": "both"} if asked.ratio else {"prefill-0": "prefill", "decode-0": "decode"}
    env = {"POINTSMAN_WORKER_STEP_DELAY_MS": str(asked.step_ms)}
    with tempfile.TemporaryDirectory(prefix="pointsman-bench-") as folder:
        rig = Rig(Path(folder), workers=workers, env=env)
        try:
            rig.start()
            batch = BatchRun(rig, asked.lines, asked.tokens).run(asked.kills)
        finally:
            rig.close()
    if asked.ratio:
        alone = EngineAlone(asked.lines, asked.tokens, asked.step_ms).run()
        say(
            "ratio", batch=round(batch, 1), engine_alone=round(alone, 1), of=round(batch / alone, 3)
        )


if __name__ == "__main__":
    main()
