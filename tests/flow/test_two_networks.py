"""Two nodes across a line of a known speed: the long prefix is pulled or computed, as it pays."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.flow.rig import REPOSITORY, Rig, wait_until
from tests.flow.talk import client, text_of
from tests.flow.test_two_nodes import counted
from tests.network_line import FAST_BITS, HERE, THERE, Line, open_line
from tiering.kvd.operator import KvdOperator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECRET = "of both ends of the line"  # noqa: S105 (of these tests alone)
NUM_TOKENS = 2_000  # 46 MB
VERY_SLOW_BITS = 20_000_000  # slower than any machine computes them, a busy one too


def start_node(rig: Rig, node: str, space: str, address: str) -> None:
    """A cache daemon in a network of its own; its workers reach it by its Unix socket."""
    socket_path = rig.folder / f"{node}.sock"
    with (rig.folder / f"kvd-{node}.log").open("ab") as log:
        rig.processes[f"kvd-{node}"] = subprocess.Popen(
            ["ip", "netns", "exec", space, sys.executable, "-m", "tiering.kvd"],
            env=rig.environment(
                POINTSMAN_KVD_SOCKET=str(socket_path),
                POINTSMAN_KVD_DRAM_BYTES=str(1 << 29),
                POINTSMAN_KVD_PEER_HOST=address,
                POINTSMAN_KVD_PEER_PORT="0",
                POINTSMAN_KVD_PEER_SECRET=SECRET,
            ),
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
        )
    wait_until(socket_path.exists, 40, f"kvd of {node}")


@pytest.fixture
def line() -> Iterator[Line]:
    with open_line() as made:
        yield made


@pytest.fixture
def rig(line: Line, smollm2: Path, tmp_path: Path) -> Iterator[Rig]:
    env = {"POINTSMAN_WORKER_LOADS": "cost"}
    rig = Rig(tmp_path, engine="torch", model=smollm2, workers={}, has_kvd=False, env=env)
    try:
        rig.start()
        for node, space, address in (("node-a", line.near, HERE), ("node-b", line.far, THERE)):
            start_node(rig, node, space, address)
        start_worker(rig, "prefill", "node-a")
        start_worker(rig, "decode", "node-b")
        rig.wait_ready()
        wait_until(
            lambda: all(beat["peer_address"] for beat in rig.beats().values()), 30, "addresses"
        )
        yield rig
    finally:
        rig.close()


def start_worker(rig: Rig, role: str, node: str) -> None:
    env = {"POINTSMAN_NODE": node, "POINTSMAN_KVD_SOCKET": str(rig.folder / f"{node}.sock")}
    rig.start_worker(f"{role}-{node}", role, **env)
    rig.wait_for_worker(f"{role}-{node}")


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(1_000, 20_000), k=NUM_TOKENS)  # noqa: S311


async def computed_at_decode(rig: Rig, seed: int) -> int:
    """How many of a fresh prompt's tokens the decode node computed."""
    computed = counted(rig, "node-b", "num_prefill_tokens")
    decoded = counted(rig, "node-b", "num_decode_tokens")
    async with client(rig) as http:
        await text_of(http, prompt(seed), max_tokens=4, ignore_eos=True)
    wait_until(lambda: counted(rig, "node-b", "num_decode_tokens") >= decoded + 2, 30, "a beat")
    return counted(rig, "node-b", "num_prefill_tokens") - computed


def is_lending(rig: Rig) -> bool:
    with KvdOperator(rig.folder / "node-a.sock", "test") as operator:
        return operator.stats().lending.num_blocks > 0


async def test_a_long_prefix_is_pulled_over_a_fast_line_and_computed_behind_a_slow_one(
    rig: Rig, line: Line
) -> None:
    line.shape(VERY_SLOW_BITS)
    await computed_at_decode(rig, 1)  # measures both the line and the model
    assert await computed_at_decode(rig, 2) > NUM_TOKENS * 0.9
    line.shape(FAST_BITS)
    decode = "decode-node-b"
    rig.terminate(decode)  # what it knew of the line is no longer so
    start_worker(rig, "decode", "node-b")
    await computed_at_decode(rig, 3)
    assert await computed_at_decode(rig, 4) < NUM_TOKENS * 0.1


async def test_a_peer_killed_in_the_middle_of_a_pull_costs_a_recompute(
    rig: Rig, line: Line, make_rig: Callable[..., Rig], smollm2: Path
) -> None:
    alone = make_rig(engine="torch", model=smollm2, workers={"both-0": "both"}, has_kvd=False)
    async with client(alone) as http:
        expected = await text_of(http, prompt(7), max_tokens=8)
    line.shape(VERY_SLOW_BITS)
    async with client(rig) as http:
        asked = asyncio.create_task(text_of(http, prompt(7), max_tokens=8))
        await asyncio.to_thread(wait_until, lambda: is_lending(rig), 120, "the pull has begun")
        rig.kill("kvd-node-a")
        assert await asked == expected
