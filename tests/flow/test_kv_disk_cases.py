"""A full disk under the NVMe tier: serving goes on, and one line says why."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.flow.rig import Rig, wait_until
from tests.flow.talk import client, text_of
from tiering.kvd.operator import KvdOperator
from tiering.kvd.stats import TierStats

DISK_MIB = 20
PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("disk")
    mount = shutil.which("mount")
    if os.geteuid() or mount is None:
        pytest.skip("mounting a small file system needs root")
    argv = [mount, "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(directory)]
    if subprocess.run(argv, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(32, 127), k=64)  # noqa: S311


async def test_c118_disk_full(make_rig: Callable[..., Rig], disk: Path) -> None:
    rig = make_rig(
        workers={"both-0": "both"},
        env={
            "POINTSMAN_KVD_DRAM_BYTES": str(32 * PAGE_BYTES),
            "POINTSMAN_KVD_NVME_BYTES": str(PAGE_BYTES + 256 * 2 * PAGE_BYTES),
            "POINTSMAN_KVD_NVME_PATH": str(disk / "slab"),
            "POINTSMAN_KVD_NVME_RETRY_S": "600",
            "POINTSMAN_WORKER_NUM_BLOCKS": "16",
        },
    )
    reference = make_rig(workers={"both-0": "both"}, has_kvd=False)
    numbers = range(60)
    async with client(reference) as alone:
        expected = [await text_of(alone, prompt(n), max_tokens=4) for n in numbers]

    def nvme() -> TierStats:
        with KvdOperator(rig.kvd_socket, "test") as operator:
            return operator.stats().tiers["nvme"]

    async with client(rig) as http:
        for number in numbers[:20]:
            assert await text_of(http, prompt(number), max_tokens=4) == expected[number]
        wait_until(lambda: nvme().slots_by_state["ready"] > 0, 20, "blocks on the disk")
        with (disk / "slab").open("r+b") as slab:
            # Someone gives the slab's tail to other files: what comes next finds no room.
            num_bytes = os.fstat(slab.fileno()).st_size
            slab.truncate(2 * PAGE_BYTES)
            slab.truncate(num_bytes)
        with pytest.raises(OSError, match="No space"):
            (disk / "filler").write_bytes(bytes((DISK_MIB + 1) << 20))
        for number in numbers:
            assert await text_of(http, prompt(number), max_tokens=4) == expected[number]

    tier = nvme()
    assert tier.health in ("read_only", "off")
    assert tier.num_io_errors >= 1
    assert tier.used_bytes <= tier.num_slots * tier.slot_bytes
    assert rig.log("kvd").count("nvme_degraded") == 1
    assert len(rig.log("kvd").splitlines()) < 40
    wait_until(
        lambda: rig.metric('pointsman_tier_health{health="on",node="node-a",tier="nvme"}') == 0,
        20,
        "the metric",
    )
    assert rig.metric('pointsman_tier_io_errors_total{node="node-a",tier="nvme"}') >= 1
