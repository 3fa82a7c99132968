"""Two nodes with a cache daemon each, on one machine and one Redis."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.flow.rig import REPOSITORY, Rig, wait_until
from tests.flow.talk import JobReading, client, submit_job, text_of
from tiering.kvd.operator import KvdOperator
from tiering.kvd.stats import KvdStats

BLOCK = 16
SECRET = "known-to-both-nodes"  # noqa: S105 (of these tests alone)


def start_node(rig: Rig, node: str, role: str) -> None:
    """A cache daemon that lends, and a worker beside it."""
    socket_path = rig.folder / f"{node}.sock"
    rig.spawn(
        f"kvd-{node}",
        "-m",
        "tiering.kvd",
        POINTSMAN_KVD_SOCKET=str(socket_path),
        POINTSMAN_KVD_DRAM_BYTES=str(16 * 2**20),
        POINTSMAN_KVD_PEER_PORT="0",
        POINTSMAN_KVD_PEER_SECRET=SECRET,
    )
    wait_until(socket_path.exists, 40, f"kvd of {node}")
    env = {"POINTSMAN_NODE": node, "POINTSMAN_KVD_SOCKET": str(socket_path)}
    rig.start_worker(f"{role}-{node}", role, **env)


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig(workers={}, has_kvd=False)
    start_node(rig, "node-a", "prefill")
    start_node(rig, "node-b", "decode")
    for name in rig.workers:
        rig.wait_for_worker(name)
    rig.wait_ready()
    return rig


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(32, 127), k=count)  # noqa: S311


@pytest.fixture(scope="module")
def reference(make_rig: Callable[..., Rig]) -> Rig:
    """One worker alone, no cache daemon: what a request answers by itself."""
    return make_rig(workers={"both-0": "both"}, has_kvd=False)


def counted(rig: Rig, node: str, what: str) -> int:
    """Sum of a counter over a node's workers, as their heartbeats tell it."""
    return sum(beat[what] for name, beat in rig.beats().items() if f"@{node}#" in name)


def kvd_stats(rig: Rig, node: str) -> KvdStats:
    with KvdOperator(rig.folder / f"{node}.sock", "test") as operator:
        return operator.stats()


def wait_for_addresses(rig: Rig) -> None:
    def are_known() -> bool:
        return all(beat["peer_address"] for beat in rig.beats().values())

    wait_until(are_known, 20, "both nodes' addresses in the heartbeats")


async def test_a_hand_over_to_another_node_brings_its_blocks_along(
    rig: Rig, reference: Rig
) -> None:
    wait_for_addresses(rig)
    prompts = [tokens(n, 100 + 37 * n) for n in range(6)]
    async with client(reference) as alone:
        expected = [await text_of(alone, prompt, max_tokens=20) for prompt in prompts]
    computed = counted(rig, "node-b", "num_prefill_tokens")
    decoded = counted(rig, "node-b", "num_decode_tokens")
    async with client(rig) as http:
        for prompt, text in zip(prompts, expected, strict=True):
            assert await text_of(http, prompt, max_tokens=20) == text
    rig.wait_at_rest()
    lent = kvd_stats(rig, "node-a").lending.num_blocks
    assert lent >= sum(len(prompt) // BLOCK for prompt in prompts)
    async with client(rig) as http:
        job_id = await submit_job(http, tokens(50, 150), max_tokens=4)
        await JobReading(job_id).read_through(http)
        job = (await http.get(f"/v1/jobs/{job_id}")).json()
    assert job["cache"]["load"] == "absent", "the prefill node had nothing"
    resumed = job["resumed_cache"]
    assert (resumed["pull"], resumed["peer"]) == ("always", "node-a")
    assert (resumed["peer_tokens"], resumed["recomputed_tokens"]) == (150, 0)
    assert resumed["hbm_tokens"] == resumed["dram_tokens"] == resumed["nvme_tokens"] == 0
    assert resumed["taken_ms"] > 0
    num_decoded = len(prompts) * 18
    wait_until(
        lambda: counted(rig, "node-b", "num_decode_tokens") - decoded >= num_decoded, 20, "decode"
    )
    # One token each, whose logits nobody can load; without the blocks it would be all of them.
    assert counted(rig, "node-b", "num_prefill_tokens") - computed <= 2 * len(prompts)


def pointsman(rig: Rig, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cli.main", *words],
        env=rig.environment(POINTSMAN_KVD_PEER_SECRET=SECRET),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def links(rig: Rig) -> dict[str, Any]:
    return {k.decode(): json.loads(v) for k, v in rig.redis.hgetall("links").items()}


def test_link_test_measures_both_ways_and_keeps_the_result(rig: Rig) -> None:
    wait_until(lambda: rig.metric("pointsman_kvd_up") == 2, 20, "both nodes report")
    tested = pointsman(rig, "link-test", "--seconds", "0.4")
    assert "from" in tested.stdout, tested.stderr
    assert tested.stdout.count("loopback") == 2
    kept = links(rig)
    assert sorted(kept) == ["node-a>node-b", "node-b>node-a"]
    for link in kept.values():
        assert link["bytes_per_s"] > 0
        assert link["round_trip_s"] > 0
        assert len(link["by_block_bytes"]) == 4

    rows = json.loads(pointsman(rig, "link-test", "node-a", "node-b", "--json").stdout)
    assert {(row["source"], row["target"]) for row in rows} == {
        ("node-a", "node-b"),
        ("node-b", "node-a"),
    }
    shown = json.loads(pointsman(rig, "link-test", "--kept", "--json").stdout)
    assert shown == [links(rig)[name] for name in ("node-a>node-b", "node-b>node-a")]
    assert SECRET not in tested.stdout + tested.stderr + rig.log("kvd-node-a")


def test_link_test_names_a_node_that_it_does_not_know(rig: Rig) -> None:
    refused = pointsman(rig, "link-test", "node-a", "node-x")
    assert refused.returncode == 1
    assert "node-x: no such node lends blocks" in refused.stderr
    assert "node-a, node-b" in refused.stderr


async def test_a_node_without_its_cache_daemon_costs_a_recompute_and_no_request(
    rig: Rig, reference: Rig
) -> None:
    prompts = [tokens(100 + n, 150) for n in range(4)]
    async with client(reference) as alone:
        expected = [await text_of(alone, prompt, max_tokens=20) for prompt in prompts]
    rig.kill("kvd-node-a")
    async with client(rig) as http:
        got = await asyncio.gather(*(text_of(http, prompt, max_tokens=20) for prompt in prompts))
    assert got == expected
