"""SIGKILL of the daemon, of a writer, of a reader at random moments under load.

`POINTSMAN_TEST_CRASH_ROUNDS=100 pytest -m slow tests/tiering/kvd/test_crash.py` is the long form.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from tiering.kvd.client import KvdClient

if TYPE_CHECKING:
    from conftest import KvdProcess

NUM_ROUNDS = int(os.environ.get("POINTSMAN_TEST_CRASH_ROUNDS", "9"))
NUM_DRAM_SLOTS, NUM_NVME_SLOTS = 96, 5000
LOAD = Path(__file__).with_name("crash_load.py")
ROOT = Path(__file__).parents[3]
END_LIMIT_S = 30
Eventually = Callable[[Callable[[], bool]], None]


def load_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("crash_load", LOAD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Load:
    """Two writers and two readers of one daemon."""

    def __init__(self, socket_path: Path, seed: int) -> None:
        self.processes = {
            f"{role}{number}": subprocess.Popen(
                [sys.executable, str(LOAD), role, str(socket_path), str(seed + number)],
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
            for role in ("writer", "reader")
            for number in (1, 2)
        }
        for process in self.processes.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "working\n"

    def kill(self, name: str) -> None:
        self.processes[name].kill()

    def end(self) -> None:
        """Kill what still works; nobody may have seen wrong bytes."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            said, _ = process.communicate(timeout=END_LIMIT_S)
            assert process.returncode in (0, -9), said


def sleep_at_random(rng: random.Random, client: KvdClient) -> int:
    """Let the load run for a while; returns the blocks that lay on the disk just before the end."""
    num_on_disk = 0
    until_s = time.monotonic() + rng.uniform(0.3, 1.0)
    while time.monotonic() < until_s:
        num_on_disk = client.stats().tiers["nvme"].slots_by_state["ready"]
    return num_on_disk


def check_nothing_leaked(client: KvdClient, eventually: Eventually) -> None:
    eventually(lambda: client.stats().num_holders == 1)
    eventually(lambda: client.stats().num_leases == 0)
    eventually(lambda: client.stats().num_reservations == 0)
    eventually(lambda: set(used_states(client)) <= {"free", "ready"})
    for name, num_slots in (("dram", NUM_DRAM_SLOTS), ("nvme", NUM_NVME_SLOTS)):
        tier = client.stats().tiers[name]
        assert tier.num_slots >= num_slots * 9 // 10
        assert sum(tier.slots_by_state.values()) + tier.num_quarantined == tier.num_slots
        assert tier.num_leases == 0


def used_states(client: KvdClient) -> Counter[str]:
    states: Counter[str] = Counter()
    for tier in client.stats().tiers.values():
        states.update(tier.slots_by_state)
    return +states


@pytest.mark.slow
@pytest.mark.timeout(60 + 20 * NUM_ROUNDS)
def test_a_kill_at_any_moment_costs_no_wrong_byte_no_slot_and_no_block_on_the_disk(
    kvd: KvdProcess, eventually: Eventually
) -> None:
    crash_load = load_module()
    rng = random.Random(20_261_129)  # noqa: S311  # moments, no secrets
    num_kept = num_expected = 0
    victims = ["kvd", "writer1", "reader1"]
    for number in range(NUM_ROUNDS):
        kvd.start(num_dram_slots=NUM_DRAM_SLOTS, num_nvme_slots=NUM_NVME_SLOTS)
        client = kvd.client("watcher")
        load = Load(kvd.socket_path, 100 * number)
        num_on_disk = sleep_at_random(rng, client)
        victim = victims[number % 3]
        if victim == "kvd":
            kvd.kill()
            client.close()
            load.end()
            kvd.start(num_dram_slots=NUM_DRAM_SLOTS, num_nvme_slots=NUM_NVME_SLOTS)
            client = kvd.client("watcher")
            assert num_on_disk > 0
            num_expected += num_on_disk
            num_found = client.stats().tiers["nvme"].slots_by_state["ready"]
            num_kept += min(num_found, num_on_disk)
        else:
            load.kill(victim)
            sleep_at_random(rng, client)
            load.end()
        check_nothing_leaked(client, eventually)
        num_right = sum(
            crash_load.read_chain(client, crash_load.chain_of(n))
            for n in range(0, crash_load.NUM_CHAINS, 7)
        )
        assert num_right > 0
        assert client.stats().tiers["dram"].num_checksum_failures == 0
        assert kvd.stop() == 0
        if number % 9 == 8:
            kvd.slab_path.unlink()  # start over: a full file would have nothing more to write
    assert num_expected > 0
    assert num_kept >= 0.99 * num_expected
