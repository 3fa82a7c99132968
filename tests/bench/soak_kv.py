"""The soak of the KV tiers: 24 clients, a pool far too small, every answer compared.

`python tests/bench/soak_kv.py [--requests 20000] [--minutes 30] [--clients 24]`: it ends with
whichever of the two comes first. A prefill and a decode worker on the digest engine, whose HBM
pools, the DRAM tier and the NVMe tier hold ever less than the sessions' KV. Sessions of three
tenants grow turn by turn behind shared prefixes; some turns are `cache: false`, some are left or
cancelled on the way.

It must show: every answer equals what the digest engine's rule says (`digest_reference`); at rest no
block is in use, leased or reserved, and after a purge the tiers are empty; no process grows by more
than a tenth after the fifth minute (of shorter runs: the first third); logs have at most a line and
a half a request. Progress every five seconds; the last line is JSON, `passed` is the verdict, and
the exit status.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.protocol.tenant import tenant_salt
from tests.bench.soak_clients import TENANTS, SoakClient, Tally
from tests.flow.rig import Rig, wait_until
from tests.flow.talk import client, keys_file
from tiering.block_hash import owner_tag
from tiering.errors import KvdUnavailable
from tiering.kvd.operator import KvdOperator
from tiering.kvd.stats import KvdStats, TierStats

SLOT_BYTES = 4096  # of DRAM; a block of the digest engine has 512 bytes
ENVIRONMENT = {
    "POINTSMAN_WORKER_NUM_BLOCKS": "64",  # the longest context takes 32
    "POINTSMAN_WORKER_STEP_DELAY_MS": "5",
    "POINTSMAN_KVD_DRAM_BYTES": str(512 * SLOT_BYTES),
    "POINTSMAN_KVD_NVME_BYTES": str(12 << 20),
    "POINTSMAN_KVD_TENANT_SHARE": "0.5",
    "POINTSMAN_RETENTION_S": "30",  # what Redis keeps is level after that
}
SETTLED_S, SETTLED_SHARE = 300.0, 0.3
LEAST_TELLING_S = 120.0
MAX_GROWTH, MAX_LINES_PER_REQUEST = 1.1, 1.5
PRIVATE_LIFETIME_S = 75.0
PROGRESS_S = 5.0


@dataclass
class MemoryWatch:
    """Resident bytes of every process, by name, over time."""

    pids: Mapping[str, int]
    samples: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    def look(self, elapsed_s: float) -> dict[str, int]:
        """Take a sample."""
        page = os.sysconf("SC_PAGE_SIZE")
        sizes = {
            name: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
            for name, pid in self.pids.items()
        }
        self.samples.append((elapsed_s, sizes))
        return sizes

    def growth(self) -> dict[str, float]:
        """The end over what it was once settled, by process; empty if the run was too short to tell.

        Settled is after five minutes, or after a third of a run that is shorter than that.
        """
        last_s = self.samples[-1][0]
        if last_s < LEAST_TELLING_S:
            return {}
        settled_s, window_s = min(SETTLED_S, SETTLED_SHARE * last_s), last_s / 10
        before = self._medians(settled_s, settled_s + window_s)
        after = self._medians(last_s - window_s, last_s)
        return {name: round(after[name] / before[name], 3) for name in self.pids}

    def _medians(self, start_s: float, stop_s: float) -> dict[str, float]:
        sizes = [sizes for at_s, sizes in self.samples if start_s <= at_s <= stop_s]
        return {name: statistics.median(each[name] for each in sizes) for name in self.pids}


def say(line: str) -> None:
    """Print one line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def soak(rig: Rig, tally: Tally, watch: MemoryWatch, num_clients: int) -> float:
    """All requests; the seconds they took."""
    began_s = time.monotonic()
    connections = [client(rig) for _ in range(num_clients)]
    workers = [
        asyncio.create_task(SoakClient(http, tally, random.Random(number)).work())  # noqa: S311
        for number, http in enumerate(connections)
    ]
    pending: set[asyncio.Task[None]] = set(workers)
    while pending:
        done, pending = await asyncio.wait(pending, timeout=PROGRESS_S)
        for worker in done:
            worker.result()
        elapsed_s = time.monotonic() - began_s
        sizes = watch.look(elapsed_s)
        shown = " ".join(f"{name} {size >> 20}" for name, size in sizes.items())
        say(
            f"{elapsed_s:6.0f} s  {tally.num_done} of {tally.num_wanted} requests, "
            f"{tally.num_faults} faults; MiB: {shown}"
        )
    for http in connections:
        await http.aclose()
    return time.monotonic() - began_s


def stats_of(rig: Rig) -> KvdStats:
    """What kvd counts now."""
    with KvdOperator(rig.kvd_socket, "soak") as operator:
        return operator.stats()


def num_busy(stats: KvdStats) -> int:
    """Slots that are neither free nor readable."""
    states = Counter[str]()
    for tier in stats.tiers.values():
        states.update(tier.slots_by_state)
    return states.total() - states["free"] - states["ready"]


def purge_all(rig: Rig) -> None:
    """Drop every tenant's blocks."""
    with KvdOperator(rig.kvd_socket, "soak") as operator:
        for tenant in TENANTS:
            operator.purge(owner_tag(tenant_salt(tenant).encode()))


def account(rig: Rig) -> list[str]:
    """What is not conserved once nothing runs any more; nothing should be."""
    settled = {
        "HBM blocks stay in use": rig.is_at_rest,
        "leases stay": lambda: not stats_of(rig).num_leases,
        "reservations stay": lambda: not stats_of(rig).num_reservations,
        "slots stay on their way": lambda: not num_busy(stats_of(rig)),
    }
    faults = [fault for what, is_met in settled.items() if (fault := unmet(what, is_met, 60))]
    for worker, beat in rig.beats().items():
        if beat["num_cached_blocks"] > beat["num_blocks"]:
            faults.append(f"{worker} has more blocks than its pool: {beat['num_cached_blocks']}")
    for name, tier in stats_of(rig).tiers.items():
        faults += (f"{name}: {fault}" for fault in tier_faults(tier))

    def is_empty() -> bool:
        purge_all(rig)
        tiers = stats_of(rig).tiers.values()
        return all(tier.slots_by_state["free"] == tier.num_slots for tier in tiers)

    left = unmet("slots stay taken after a purge", is_empty, PRIVATE_LIFETIME_S)
    return [*faults, left] if left else faults


def unmet(what: str, is_met: Callable[[], bool], limit_s: float) -> str:
    """Empty if it is met within the limit."""
    try:
        wait_until(is_met, limit_s)
    except (TimeoutError, KvdUnavailable) as error:
        return f"{what}: {error}"[:400]
    return ""


def tier_faults(tier: TierStats) -> list[str]:
    """What is wrong with a tier's own accounts."""
    faults = []
    num_slots = sum(tier.slots_by_state.values())
    num_owned = sum(tier.slots_by_owner.values())
    if num_slots != tier.num_slots:
        faults.append(f"{num_slots} of {tier.num_slots} slots are accounted for")
    if num_owned > tier.num_slots - tier.slots_by_state["free"]:
        faults.append(f"owners hold {num_owned} slots, more than are taken")
    if tier.num_checksum_failures or tier.num_io_errors:
        faults.append("checksums or the disk failed")
    return faults


def log_lines(rig: Rig) -> tuple[dict[str, int], list[tuple[str, int]]]:
    """Lines by process, and the events that made the most of them."""
    events: Counter[str] = Counter()
    counts: dict[str, int] = {}
    for name in rig.processes:
        lines = rig.log(name).splitlines()
        counts[name] = len(lines)
        for line in lines:
            is_json = line.startswith("{")
            event = json.loads(line).get("event", "?") if is_json else line[:40]
            events[f"{name}: {event}"] += 1
    return counts, events.most_common(8)


def loads_of(rig: Rig) -> dict[str, int]:
    """Loads of all workers by what became of them, and preemptions."""
    reasons: Counter[str] = Counter()
    for beat in rig.beats().values():
        reasons.update(beat["load_reasons"])
        reasons["preempted"] += beat["num_preemptions"]
        reasons["spilled"] += beat["num_spills"]
    return dict(reasons)


def run(options: argparse.Namespace, folder: Path) -> int:
    """One soak; the exit status."""
    env = ENVIRONMENT | {"POINTSMAN_GATEWAY_KEYS_FILE": str(keys_file(folder, *TENANTS))}
    rig = Rig(folder, env=env)
    try:
        rig.start()
        pids = {name: process.pid for name, process in rig.processes.items()}
        watch = MemoryWatch(pids | {"redis": rig.redis_server.pid or 0})
        tally = Tally(options.requests, time.monotonic() + 60 * options.minutes)
        seconds = asyncio.run(soak(rig, tally, watch, options.clients))
        faults = account(rig)
        stats, loads = stats_of(rig), loads_of(rig)
        lines, events = log_lines(rig)
    finally:
        rig.close()
    growth = watch.growth()
    lines_per_request = sum(lines.values()) / max(tally.num_done, 1)
    passed = (
        tally.num_equal == tally.num_done > 0
        and not faults
        and all(ratio <= MAX_GROWTH for ratio in growth.values())
        and lines_per_request <= MAX_LINES_PER_REQUEST
    )
    for words in [*tally.faults, *faults]:
        say(f"FAULT {words}")
    line = {
        "passed": passed,
        "requests": tally.num_done,
        "equal": tally.num_equal,
        "faults": tally.num_faults + len(faults),
        "seconds": round(seconds, 1),
        "kinds": dict(tally.kinds),
        "cached_share": round(tally.num_cached_tokens / max(tally.num_prompt_tokens, 1), 3),
        "loads": loads,
        "evictions": {name: tier.evictions for name, tier in stats.tiers.items()},
        "rss_growth": growth or "too short a run to tell",
        "log_lines": lines,
        "log_events": events,
    }
    say(json.dumps(line))
    return int(not passed)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=24)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return run(options, Path(folder))


if __name__ == "__main__":
    raise SystemExit(main())
