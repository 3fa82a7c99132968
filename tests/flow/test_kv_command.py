"""`pointsman kv` and the tiers on /metrics and `pointsman status`, on a real pipeline."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli.kv import owner_of
from tests.flow.rig import REPOSITORY, Rig, wait_until
from tests.flow.talk import client, complete
from tiering.kvd.operator import KvdOperator, ListedBlock
from tiering.tier import Tier


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(workers={"both-0": "both"})


def pointsman(rig: Rig, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cli.main", *map(str, words)],
        env=rig.environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def blocks_of(rig: Rig, tenant: str | None = None) -> list[ListedBlock]:
    with KvdOperator(rig.kvd_socket, "test") as operator:
        return list(operator.listed(Tier.DRAM, owner_of(tenant) if tenant else b""))


def cached_in_hbm(rig: Rig) -> int:
    return sum(beat["num_cached_blocks"] for beat in rig.beats().values())


async def test_a_warmed_prompt_is_a_hit_and_the_tiers_show_it(rig: Rig, tmp_path: Path) -> None:
    prompts = [f"{number} {'a typical prompt ' * 6}" for number in range(6)]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts))

    warmed = pointsman(rig, "kv", "warm", file, "--url", rig.base_url)
    assert warmed.returncode == 0, warmed.stdout + warmed.stderr
    assert "warm: 6 prompts" in warmed.stdout
    async with client(rig) as http:
        answer = await complete(http, prompts[0], max_tokens=1)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 80

    wait_until(lambda: len(blocks_of(rig)) >= 30, 20, "the blocks of six prompts")
    stats = json.loads(pointsman(rig, "kv", "stats", "--json").stdout)
    assert stats["tiers"]["dram"]["slots_by_state"]["ready"] >= 30
    assert "dram" in pointsman(rig, "kv", "stats").stdout
    listed = pointsman(rig, "kv", "ls", "--limit", 3).stdout
    assert listed.count(" 16 ") == 3
    assert "more than 3" in listed
    wait_until(lambda: rig.metric("pointsman_tier_ready_bytes") > 0, 20, "metrics of the tiers")
    assert rig.metric("pointsman_kvd_up") == 1
    status = pointsman(rig, "status").stdout
    assert "tiers" in status
    assert "node-a  dram  on" in status


def test_a_file_without_prompts_and_a_daemon_that_is_away_are_said(
    rig: Rig, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    refused = pointsman(rig, "kv", "warm", empty, "--url", rig.base_url)
    assert (refused.returncode, "holds no prompt" in refused.stderr) == (1, True)
    refused = pointsman(rig, "kv", "stats", "--kvd-socket", tmp_path / "none")
    assert (refused.returncode, "is unavailable" in refused.stderr) == (1, True)
    refused = pointsman(rig, "kv", "warm", __file__, "--url", "http://127.0.0.1:9")
    assert (refused.returncode, "no gateway" in refused.stderr) == (1, True)


async def test_a_purge_drops_one_tenants_blocks_and_no_others(rig: Rig) -> None:
    async with client(rig) as http:
        await complete(
            http, "something of the default tenant, long enough for blocks", max_tokens=1
        )
    wait_until(lambda: len(blocks_of(rig, "default")) >= 3, 20, "blocks of the tenant")
    wait_until(lambda: cached_in_hbm(rig) > 0, 20, "blocks in the worker's HBM")
    purged = pointsman(rig, "kv", "purge", "--tenant", "nobody-of-this-name")
    assert (purged.returncode, purged.stdout.split()[0]) == (0, "0")
    assert " 16 " in pointsman(rig, "kv", "ls", "--tenant", "default").stdout
    purged = pointsman(rig, "kv", "purge", "--tenant", "default")
    assert purged.returncode == 0
    assert int(purged.stdout.split()[0]) >= 3
    wait_until(lambda: not blocks_of(rig, "default"), 20, "no blocks of the tenant")
    wait_until(lambda: cached_in_hbm(rig) == 0, 20, "no blocks in the worker's HBM either")


def test_a_killed_cache_daemon_shows_on_the_metrics_page(rig: Rig) -> None:
    wait_until(lambda: rig.metric("pointsman_kvd_up") == 1, 20, "kvd up")
    rig.kill("kvd")
    wait_until(lambda: rig.metric("pointsman_kvd_up") == 0, 20, "kvd down")
    rig.start_kvd()
    wait_until(lambda: rig.metric("pointsman_kvd_up") == 1, 20, "kvd up again")
