"""The fault matrix: faults on a loaded pipeline, and what became of every request.

Run: make chaos   (or: python -m tests.chaos.run [--only TEXT] [--report FILE] [--json FILE]
                       python -m tests.chaos.run --long [--minutes N] [--seed N])
Every stream and every line of the batch has an undisturbed twin: lost, doubled and changed mean
against that. The long run loads all the time, causes one fault a minute, drawn by lot, and looks
whether memory and keys stay where they were.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from pipeline.cli.embedded_redis import free_port
from tests.chaos.batch_load import BatchLoad, lines, upload
from tests.chaos.causes import SECOND_GATEWAY, WORKERS, revive, start_flower
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.load import MAX_TOKENS, Reader, prompt, start_readers
from tests.chaos.report import (
    Outcome,
    around_table,
    show,
    show_head,
    write_json,
    write_table,
)
from tests.chaos.watch import RETENTION_S, Watch
from tests.flow.rig import Rig
from tests.flow.talk import client, text_of

NUM_STREAMS = 12
NUM_JOBS = 4  # streams at batch priority
NUM_LINES = 130
END_LIMIT_S = 150.0
READ_LIMIT_S = 5.0  # a gateway that is silent for so long is left for another one
FAULT_EVERY_S = 60.0
NO_FAULT = "-"


@dataclass
class Arena:
    """A pipeline, the addresses of its gateways, and what everything says undisturbed."""

    rig: Rig
    urls: Sequence[str]
    texts: Sequence[str]
    file_id: str
    line_texts: Mapping[str, str]


def http_client() -> httpx.AsyncClient:
    """No limit on connections, so that streams do not wait for each other."""
    return httpx.AsyncClient(timeout=READ_LIMIT_S, limits=httpx.Limits(max_connections=None))


def make_rig(folder: Path, env: Mapping[str, str]) -> Rig:
    """Two of each worker, two gateways, cache daemon, Flower, a Redis with an append-only file."""
    env = {
        **env,
        "POINTSMAN_WORKER_STEP_DELAY_MS": "20",
        "POINTSMAN_WORKER_CANARY_IDLE_S": "30",
        # Half a minute without workers, and the time that four of them take to start on a small machine.
        "POINTSMAN_QUEUE_DEADLINE_S": "120",
    }
    rig = Rig(folder, workers=dict(WORKERS), env=env)
    rig.start()
    rig.start_gateway(SECOND_GATEWAY, free_port())
    start_flower(rig)
    return rig


async def prepare(rig: Rig) -> Arena:
    """Hear what each stream and each line says undisturbed."""
    urls = tuple(f"http://127.0.0.1:{port}" for port in rig.gateway_ports.values())
    async with client(rig) as http, asyncio.timeout(END_LIMIT_S):
        numbers = range(NUM_STREAMS + NUM_JOBS)
        texts = await asyncio.gather(
            *(text_of(http, prompt(n), max_tokens=MAX_TOKENS) for n in numbers)
        )
    async with http_client() as http, asyncio.timeout(END_LIMIT_S):
        file_id = await upload(http, urls, lines(NUM_LINES))
        batch = BatchLoad(urls, file_id)
        await batch.order(http)
        await batch.read_to_the_end(http)
    if len(batch.texts) != NUM_LINES:
        raise RuntimeError(f"undisturbed, {len(batch.texts)} of {NUM_LINES} lines have a result")
    return Arena(rig, urls, texts, file_id, batch.texts)


def judge(arena: Arena, fault: Fault, readers: list[Reader], batch: BatchLoad) -> Outcome:
    """Compare each stream and each line with its twin."""
    lost = [r for r in readers if not r.is_done or r.error is not None]
    changed = [
        r for r in readers if r.is_done and r.error is None and r.text != arena.texts[r.number]
    ]
    errors = {reader.error or "no end" for reader in lost}
    num_lost_lines = batch.num_lost(arena.line_texts)
    if num_lost_lines:
        errors.add(f"{num_lost_lines} lines of the batch")
    return Outcome(
        fault=fault.name,
        requests=len(readers) + len(arena.line_texts),
        lost=len(lost) + num_lost_lines,
        doubled=sum(r.num_doubled + r.num_holes for r in readers) + batch.num_doubled(),
        changed=len(changed) + batch.num_changed(arena.line_texts),
        longest_pause_s=round(max(reader.longest_gap_s for reader in readers), 2),
        recovery_s=round(max(reader.recovery_s for reader in readers), 2),
        limit_s=fault.limit_s,
        errors=", ".join(sorted(errors)),
    )


async def meet(arena: Arena, fault: Fault) -> Outcome:
    """Load, fault, end, verdict; the pipeline is whole again afterwards."""
    async with http_client() as http:
        batch = BatchLoad(arena.urls, arena.file_id)
        await batch.order(http)
        readers, tasks = await start_readers(http, arena.urls, NUM_STREAMS, NUM_JOBS)
        tasks.append(asyncio.create_task(batch.read_to_the_end(http)))
        await asyncio.to_thread(fault.cause, arena.rig)
        over_s = time.monotonic()
        for reader in readers:
            reader.fault_over_s = over_s
        await asyncio.wait(tasks, timeout=END_LIMIT_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(revive, arena.rig)
    await asyncio.to_thread(arena.rig.wait_ready)
    await asyncio.to_thread(arena.rig.wait_at_rest, 30.0)
    return judge(arena, fault, readers, batch)


async def run(faults: Iterable[Fault], *, is_long: bool) -> tuple[list[Outcome], list[str]]:
    """All faults in order on one pipeline; after a long run also what it left behind, in words."""
    env = {"POINTSMAN_RETENTION_S": str(RETENTION_S)} if is_long else {}
    with pipeline(env) as rig:
        arena = await prepare(rig)
        watch = await asyncio.to_thread(Watch, rig)
        show_head()
        outcomes = []
        for fault in faults:
            outcomes.append(await meet(arena, fault))
            show(outcomes[-1])
            if is_long:
                watch.look()
        return outcomes, await asyncio.to_thread(watch.verdict) if is_long else []


@contextlib.contextmanager
def pipeline(env: Mapping[str, str]) -> Iterator[Rig]:
    """A pipeline in a folder of its own, both gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        rig = make_rig(Path(folder), env)
        try:
            yield rig
        finally:
            rig.close()


def at_random(faults: Sequence[Fault], seed: int, minutes: float, rest_s: float) -> Iterator[Fault]:
    """A fault a minute by lot, and load without one between; the same seed draws the same ones."""
    lot = random.Random(seed)  # noqa: S311 - to be replayed
    no_fault = Fault(NO_FAULT, lambda _rig: time.sleep(rest_s))
    next_s = time.monotonic()
    until_s = next_s + 60 * minutes
    while time.monotonic() < until_s:
        if time.monotonic() < next_s:
            yield no_fault
        else:
            next_s += FAULT_EVERY_S
            yield lot.choice(faults)


def options() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name holds this text")
    parser.add_argument("--report", type=Path, default=None, help="page that gets the table")
    parser.add_argument("--json", type=Path, default=None, help="write the outcomes here")
    parser.add_argument("--long", action="store_true", help="random faults")
    parser.add_argument("--minutes", type=float, default=60.0, help="of random faults")
    parser.add_argument(
        "--rest", type=float, default=0.0, help="seconds after loads without a fault"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the random faults")
    chosen = parser.parse_args()
    if chosen.report is not None:
        try:  # before the faults, not after them
            around_table(chosen.report)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    return chosen


def main() -> int:
    """0 if nothing was lost, doubled, changed or late."""
    chosen = options()
    faults: Iterable[Fault] = [fault for fault in FAULTS if chosen.only in fault.name]
    if chosen.long:
        seed = int(time.time()) if chosen.seed is None else chosen.seed
        sys.stdout.write(f"{chosen.minutes:g} minutes of random faults, --seed {seed}\n")
        faults = at_random(list(faults), seed, chosen.minutes, chosen.rest)
    began_s = time.monotonic()
    outcomes, left = asyncio.run(run(faults, is_long=chosen.long))
    if chosen.json is not None:
        write_json(chosen.json, outcomes)
    if chosen.report is not None:
        command = shlex.join(["python", "-m", "tests.chaos.run", *sys.argv[1:]])
        write_table(chosen.report, outcomes, command, time.monotonic() - began_s)
    bad = [outcome.fault for outcome in outcomes if not outcome.is_good] + left
    sys.stdout.write(
        f"{sum(outcome.requests for outcome in outcomes)} requests, "
        f"{sum(outcome.fault != NO_FAULT for outcome in outcomes)} faults, "
        f"{len(bad)} with harm{': ' if bad else ''}{', '.join(bad)}\n"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
