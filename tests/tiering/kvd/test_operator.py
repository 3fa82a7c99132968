"""An operator at a real daemon: it looks and purges, and holds nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tiering.block_hash import owner_tag
from tiering.errors import KvdUnavailable
from tiering.kvd.client import KvdClient
from tiering.kvd.operator import KvdOperator
from tiering.kvd.protocol import Op
from tiering.tier import Tier

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import KvdProcess

BLOCK_BYTES = 10_000
OWNER = owner_tag(b"somebody")


def put(client: KvdClient, numbers: range, owner: bytes = b"") -> int:
    keys = [number.to_bytes(16, "big") for number in numbers]
    granted = [r for r in client.reserve(keys, owner=owner) if r is not None]
    for reservation in granted:
        client.write(reservation, np.full(BLOCK_BYTES, 7, dtype=np.uint8), 16)
    return client.commit(granted)


def test_an_operator_asks_before_any_worker_came_and_leaves_the_layout_open(
    kvd: KvdProcess,
) -> None:
    kvd.start()
    with KvdOperator(kvd.socket_path, "op") as operator:
        assert operator.stats().block_bytes == 0
        client = kvd.client(block_bytes=4096)
        assert operator.stats().num_holders == 1
        client.close()
        kvd.client(block_bytes=BLOCK_BYTES)  # the operator is no holder of the old layout
        assert operator.stats().block_bytes == BLOCK_BYTES


def test_blocks_are_listed_by_tier_and_owner_and_purged(kvd: KvdProcess) -> None:
    kvd.start(num_dram_slots=4096)
    client = kvd.client()
    assert put(client, range(1500)) == 1500
    assert put(client, range(5000, 5003), OWNER) == 3
    with KvdOperator(kvd.socket_path, "op") as operator:
        listed = list(operator.listed(Tier.DRAM))
        assert [int.from_bytes(b.key, "big") for b in listed] == [*range(1500), 5000, 5001, 5002]
        assert {(b.num_tokens, b.num_bytes, b.num_leases) for b in listed} == {(16, BLOCK_BYTES, 0)}
        assert [b.owner for b in operator.listed(Tier.DRAM, OWNER)] == [OWNER] * 3
        assert list(operator.listed(Tier.NVME)) == []
        lease = client.acquire([(5001).to_bytes(16, "big")])
        assert operator.purge(OWNER) == 2, "what is in use stays"
        assert [b.num_leases for b in operator.listed(Tier.DRAM, OWNER)] == [1]
        client.release(lease)
        assert operator.purge(OWNER) == 1
        assert list(operator.listed(Tier.DRAM, OWNER)) == []
        assert operator.stats().tiers["dram"].slots_by_state["ready"] == 1500


@pytest.mark.parametrize("op", [Op.RESERVE, Op.ACQUIRE, Op.COMMIT])
def test_an_operator_that_asks_for_a_share_is_broken_off(kvd: KvdProcess, op: Op) -> None:
    kvd.start()
    with KvdOperator(kvd.socket_path, "op") as operator, pytest.raises(KvdUnavailable):
        operator._connection.ask(op, [bytes(16)], 1.0, 1.0)


def test_a_daemon_that_is_not_there_is_said_to_be_away(tmp_path: Path) -> None:
    with pytest.raises(KvdUnavailable, match=r"no\.sock"):
        KvdOperator(tmp_path / "no.sock", "op").connect()
