"""The fault matrix: faults on a loaded pipeline, and what became of every request.

Run: make chaos   (or: python -m tests.chaos.run [--only TEXT] [--rounds N] [--seed N] [--json FILE])
Every stream has an undisturbed twin: lost, doubled and changed mean against that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from tests.chaos.faults import FAULTS, WORKERS, Fault
from tests.chaos.load import MAX_TOKENS, Reader, prompt, start_readers
from tests.flow.rig import Rig
from tests.flow.talk import client, text_of

NUM_STREAMS = 12
NUM_BATCH = 4
END_LIMIT_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """What a fault did to the requests that it met."""

    fault: str
    requests: int
    lost: int
    doubled: int
    changed: int
    slowest_recovery_s: float
    errors: str

    @property
    def is_good(self) -> bool:
        return self.lost == self.doubled == self.changed == 0


def judge(fault: Fault, readers: list[Reader], expected: list[str]) -> Outcome:
    """Compare each stream with its twin."""
    lost = [r for r in readers if not r.is_done or r.error is not None]
    changed = [r for r in readers if r.is_done and r.error is None and r.text != expected[r.number]]
    return Outcome(
        fault=fault.name,
        requests=len(readers),
        lost=len(lost),
        doubled=sum(reader.num_doubled + reader.num_holes for reader in readers),
        changed=len(changed),
        slowest_recovery_s=round(max(reader.longest_gap_s for reader in readers), 2),
        errors=", ".join(sorted({reader.error or "no end" for reader in lost})),
    )


async def expected_texts(rig: Rig) -> list[str]:
    """What each stream says undisturbed."""
    async with client(rig) as http:
        numbers = range(NUM_STREAMS + NUM_BATCH)
        return [await text_of(http, prompt(n), max_tokens=MAX_TOKENS) for n in numbers]


async def meet(rig: Rig, fault: Fault, expected: list[str]) -> Outcome:
    """Load, fault, end, verdict; the rig is whole again afterwards."""
    urls = (rig.base_url, f"http://127.0.0.1:{rig.port + 1}")
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=15, limits=limits) as http:
        readers, tasks = await start_readers(http, urls, NUM_STREAMS, NUM_BATCH)
        await asyncio.to_thread(fault.cause, rig)
        await asyncio.wait(tasks, timeout=END_LIMIT_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(fault.mend, rig)
    await asyncio.to_thread(rig.wait_ready)
    await asyncio.to_thread(rig.wait_at_rest, 30.0)
    return judge(fault, readers, expected)


def show(outcome: Outcome) -> None:
    """One line of the table."""
    mark = "ok  " if outcome.is_good else "FAIL"
    sys.stdout.write(
        f"{mark} {outcome.fault:<36} {outcome.requests:>4} {outcome.lost:>5} {outcome.doubled:>8}"
        f" {outcome.changed:>8} {outcome.slowest_recovery_s:>9.2f} s  {outcome.errors}\n"
    )
    sys.stdout.flush()


def make_rig(folder: Path) -> Rig:
    """Two of each worker, two gateways, a cache daemon, a Redis with an append-only file."""
    rig = Rig(folder, workers=dict(WORKERS), env={"POINTSMAN_WORKER_STEP_DELAY_MS": "20"})
    rig.start()
    rig.start_gateway("gateway-b", rig.port + 1)
    return rig


async def run(faults: list[Fault]) -> list[Outcome]:
    """All faults in order on one pipeline."""
    with tempfile.TemporaryDirectory() as folder:
        rig = await asyncio.to_thread(make_rig, Path(folder))
        try:
            expected = await expected_texts(rig)
            head = f"     {'fault':<36} {'reqs':>4} {'lost':>5} {'doubled':>8} {'changed':>8} {'recovery':>11}\n"
            sys.stdout.write(head)
            outcomes = []
            for fault in faults:
                outcomes.append(await meet(rig, fault, expected))
                show(outcomes[-1])
            return outcomes
        finally:
            rig.close()


def main() -> int:
    """0 if nothing was lost, doubled or changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name holds this text")
    parser.add_argument("--rounds", type=int, default=0, help="so many random faults instead")
    parser.add_argument("--seed", type=int, default=None, help="of the random faults")
    parser.add_argument("--json", type=Path, default=None, help="write the outcomes here")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if options.only in fault.name]
    if options.rounds:
        seed = int(time.time()) if options.seed is None else options.seed
        sys.stdout.write(f"{options.rounds} random faults, --seed {seed}\n")
        faults = random.Random(seed).choices(faults, k=options.rounds)  # noqa: S311
    outcomes = asyncio.run(run(faults))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    bad = [outcome.fault for outcome in outcomes if not outcome.is_good]
    sys.stdout.write(
        f"{len(outcomes)} faults, {len(bad)} with harm{': ' if bad else ''}{', '.join(bad)}\n"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
