"""Replay published traces through the evictors: hit rates by policy and capacity, and speed.

    python tests/bench/evict_replay.py [--traces DIR] [--policies lru,arc] [--capacities 1000,10000]

The hit rate is the usable-prefix one of notes/kv.md section 4: of a request's blocks only the
leading run of resident ones counts. A request is looked up whole, then its blocks are used in
order (tail first for all but LRU and LFU, as in the notes). A speed counts block references (up to
three calls on the evictor each) per second of CPU time of one core, at the slowest capacity.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tiering.eviction.evictor import Evictor
from tiering.eviction.policies import EvictionPolicy, new_evictor_of

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
NAMES = ("conversation", "synthetic")
CAPACITIES = (1_000, 3_000, 5_859, 10_000, 20_000, 30_000)
HEAD_FIRST = (EvictionPolicy.LRU, EvictionPolicy.LFU)
TOLERANCE = 0.005
# notes/kv.md section 4: usable-prefix hits of independent implementations.
REFERENCE: dict[tuple[str, str], tuple[float, ...]] = {
    ("conversation", "lru"): (0.044, 0.065, 0.136, 0.211, 0.287, 0.326),
    ("synthetic", "lru"): (0.082, 0.188, 0.309, 0.423, 0.571, 0.624),
    ("conversation", "lfu"): (0.081, 0.118, 0.151, 0.188, 0.249, 0.280),
    ("synthetic", "lfu"): (0.082, 0.176, 0.290, 0.420, 0.594, 0.626),
    ("conversation", "arc"): (0.053, 0.087, 0.150, 0.225, 0.289, 0.311),
    ("synthetic", "arc"): (0.096, 0.199, 0.319, 0.436, 0.593, 0.626),
    ("conversation", "lfuda"): (0.045, 0.071, 0.145, 0.217, 0.296, 0.328),
    ("synthetic", "lfuda"): (0.087, 0.194, 0.315, 0.428, 0.585, 0.626),
    ("conversation", "s3fifo"): (0.057, 0.094, 0.156, 0.198, 0.253, 0.304),
    ("synthetic", "s3fifo"): (0.086, 0.187, 0.315, 0.418, 0.562, 0.612),
}
HELD_TO_REFERENCE = ("lru", "lfu", "arc")
SLOWEST_PER_S = {"lru": 1_000_000, "arc": 300_000}  # references a second that a core must reach


@dataclass(frozen=True, slots=True)
class Replay:
    """What one run over a trace gave."""

    hit_rate: float
    num_refs: int
    cpu_s: float

    @property
    def refs_per_s(self) -> float:
        """Block references per second of CPU time, the replay's own work included."""
        return self.num_refs / self.cpu_s


def say(line: str) -> None:
    """Print one line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def read_requests(path: Path) -> list[list[bytes]]:
    """Block keys of each request of a Mooncake trace, in order of arrival."""
    keys: dict[int, bytes] = {}
    requests = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            ids = json.loads(line)["hash_ids"]
            requests.append([keys.setdefault(i, i.to_bytes(16, "big")) for i in ids])
    return requests


def replay(
    requests: Sequence[Sequence[bytes]], evictor: Evictor, num_slots: int, *, is_tail_first: bool
) -> Replay:
    """Run all requests through a cache of `num_slots` blocks."""
    resident: set[bytes] = set()
    num_hits = num_refs = 0
    admit, remove, next_victims = evictor.admit, evictor.remove, evictor.next_victims
    began_s = time.process_time()
    for keys in requests:
        num_refs += len(keys)
        for key in keys:
            if key not in resident:
                break
            num_hits += 1
        for key in reversed(keys) if is_tail_first else keys:
            if key not in resident:
                if len(resident) >= num_slots:
                    (victim,) = next_victims(1)
                    remove(victim, is_evicted=True)
                    resident.remove(victim)
                resident.add(key)
            admit(key)
    return Replay(num_hits / num_refs, num_refs, time.process_time() - began_s)


def replay_policy(
    requests: Sequence[Sequence[bytes]], policy: EvictionPolicy, num_slots: int
) -> Replay:
    """One policy at one capacity, in the order in which the notes replayed it."""
    evictor = new_evictor_of(policy, ttl_s=600.0)(num_slots)
    return replay(requests, evictor, num_slots, is_tail_first=policy not in HEAD_FIRST)


def report(name: str, policy: EvictionPolicy, capacities: Sequence[int], traces: Path) -> list[str]:
    """Print one row; returns what is wrong with it."""
    requests = read_requests(traces / f"mooncake_{name}_trace.jsonl")
    reference = dict(zip(CAPACITIES, REFERENCE.get((name, policy.value), ()), strict=False))
    cells, faults, slowest = [], [], float("inf")
    for num_slots in capacities:
        got = replay_policy(requests, policy, num_slots)
        slowest = min(slowest, got.refs_per_s)
        wanted = reference.get(num_slots)
        cells.append(f"{got.hit_rate:.3f}" + (f" ({got.hit_rate - wanted:+.3f})" if wanted else ""))
        if policy in HELD_TO_REFERENCE and wanted and abs(got.hit_rate - wanted) > TOLERANCE:
            faults.append(f"{name} {policy} {num_slots}: {got.hit_rate:.4f}, not {wanted}")
    say(f"{name:<13}{policy:<8}" + "".join(f"{c:>16}" for c in cells) + f"{slowest:>12,.0f}/s")
    if slowest < SLOWEST_PER_S.get(policy.value, 0):
        faults.append(f"{name} {policy}: {slowest:,.0f} references a second")
    return faults


def main() -> int:
    """Exit status 1 when a hit rate or a speed is not what the notes and the issue ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--names", default=",".join(NAMES))
    parser.add_argument("--policies", default="lru,lfu,lfuda,arc,s3fifo")
    parser.add_argument("--capacities", default=",".join(map(str, CAPACITIES)))
    options = parser.parse_args()
    capacities = [int(number) for number in options.capacities.split(",")]
    say(
        f"{'trace':<13}{'policy':<8}"
        + "".join(f"{c:>16,}" for c in capacities)
        + f"{'slowest':>14}"
    )
    faults = []
    for name in options.names.split(","):
        for policy in options.policies.split(","):
            faults += report(name, EvictionPolicy(policy), capacities, options.traces)
    for fault in faults:
        say(f"FAILED {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
