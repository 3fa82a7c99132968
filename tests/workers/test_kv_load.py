"""The loader alone, against a real cache daemon."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np

from pipeline.scheduling.transfer_cost import LoadPolicy, TransferCost
from tiering.kvd.client import KvdClient
from tiering.lease import BlockLease
from workers.hbm_pool import HostPool
from workers.kv_jobs import PrefetchJob
from workers.kv_load import BlockLoader

BLOCK_BYTES, BLOCK_TOKENS = 512, 16
KEYS = [number.to_bytes(16, "big") for number in range(1, 7)]


class SlowDiskClient(KvdClient):
    """A client whose disk gives `at_most` blocks in the time that a piece has."""

    at_most = 0

    def acquire(self, keys: Any, **options: Any) -> BlockLease:
        return super().acquire(keys[: self.at_most], **options)


def test_a_prefetch_goes_on_behind_a_piece_of_which_not_all_came_in_time(kvd: Any) -> None:
    with closing(kvd.client("first")) as first:
        first.connect()
        granted = [reservation for reservation in first.reserve(KEYS) if reservation is not None]
        for reservation in granted:
            first.write(reservation, np.ones(BLOCK_BYTES, np.uint8), BLOCK_TOKENS)
        assert first.commit(granted) == len(KEYS)
    kvd.end()
    kvd.start()
    cost = TransferCost(BLOCK_BYTES / BLOCK_TOKENS, LoadPolicy.ALWAYS)
    loader = BlockLoader(HostPool(8, BLOCK_BYTES), BLOCK_TOKENS, cost)
    job = PrefetchJob(list(KEYS))
    with closing(SlowDiskClient(kvd.socket_path, BLOCK_BYTES, "slow")) as client:
        client.connect()
        client.at_most = 2
        assert [loader.prefetch(client, job) for _ in range(2)] == [2, 2]
        assert job.keys == KEYS[4:]
        assert client.locate(KEYS)[0] == 4
        client.at_most = 0
        assert loader.prefetch(client, job) == 0
        assert job.keys == [], "where nothing came going on is of no use"
