"""What a long run leaves behind: memory of each process, and keys in Redis."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil

from tests.flow.rig import Rig

MIB = 2**20
RETENTION_S = 30  # of ended requests, so that keys can be seen to go
MAX_GROWTH = 0.10
ETERNAL = -1  # Redis's TTL of a key without one
SETTLED_S = 600.0  # by then every cache of a process has been filled


def key_kinds(rig: Rig) -> Counter[str]:
    """How many keys that nothing will end, of each kind: the part of a name before its first colon.

    Kombu's bindings are those of Celery's own exchanges, made when Flower first asks: a fixed few.
    """
    names = [key.decode() for key in rig.redis.scan_iter(count=1000)]
    with rig.redis.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.ttl(name)
        ttls_s = pipe.execute()
    return Counter(
        name.partition(":")[0]
        for name, ttl_s in zip(names, ttls_s, strict=True)
        if ttl_s == ETERNAL and not name.startswith("_kombu.binding")
    )


@dataclass
class Watch:
    """Looks at rest, between loads; made after a first load, which leaves what is kept once."""

    rig: Rig
    began_s: float = field(default_factory=time.monotonic)
    minute: int = 0
    keys_before: Counter[str] = field(default_factory=Counter)
    settled_mib: dict[str, int] = field(default_factory=dict)
    last_mib: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys_before = key_kinds(self.rig)

    def look(self) -> None:
        """Memory now; that of the settled process is kept for comparison."""
        pids = {name: process.pid for name, process in self.rig.processes.items()}
        self.last_mib = {
            name: psutil.Process(pid).memory_info().rss // MIB for name, pid in pids.items()
        }
        elapsed_s = time.monotonic() - self.began_s
        if not self.settled_mib and elapsed_s > SETTLED_S:
            self.settled_mib = dict(self.last_mib)
        if elapsed_s // 60 > self.minute:
            self.minute = int(elapsed_s // 60)
            sys.stdout.write(f"     minute {self.minute}, MiB: {self.last_mib}\n")
            sys.stdout.flush()

    def grown(self) -> dict[str, float]:
        """Processes that hold more than a tenth more than when they had settled, as a ratio."""
        ratios = {
            name: self.last_mib[name] / mib
            for name, mib in self.settled_mib.items()
            if name in self.last_mib
        }
        return {n: round(ratio, 2) for n, ratio in ratios.items() if ratio > 1 + MAX_GROWTH}

    def left_keys(self, limit_s: float = 2.0 * RETENTION_S) -> dict[str, int]:
        """Kinds of keys of which more are left than before, when ended requests have gone."""
        until_s = time.monotonic() + limit_s
        while left := key_kinds(self.rig) - self.keys_before:
            if time.monotonic() > until_s:
                break
            time.sleep(1.0)
        return dict(left)

    def verdict(self) -> list[str]:
        """What is wrong, in words; empty if nothing is."""
        if not self.settled_mib:
            sys.stdout.write(f"     too short to compare memory: {SETTLED_S / 60:.0f} minutes\n")
        faults = [f"{name} grew to {ratio} times" for name, ratio in self.grown().items()]
        return faults + [f"{count} keys {kind!r} left" for kind, count in self.left_keys().items()]
