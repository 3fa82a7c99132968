"""Two nodes with a cache daemon each, on one machine and one Redis."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.flow.rig import REPOSITORY, Rig, wait_until

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
    assert SECRET not in tested.stdout + tested.stderr + rig.log("kvd-node-a")


def test_link_test_names_a_node_that_it_does_not_know(rig: Rig) -> None:
    refused = pointsman(rig, "link-test", "node-a", "node-x")
    assert refused.returncode == 1
    assert "node-x: no such node lends blocks" in refused.stderr
    assert "node-a, node-b" in refused.stderr
