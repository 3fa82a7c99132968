"""The eviction policies by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

from tiering.eviction.arc import ArcEvictor
from tiering.eviction.evictor import Evictor, NewEvictor
from tiering.eviction.lfu import LfudaEvictor, LfuEvictor
from tiering.eviction.lru import LruEvictor
from tiering.eviction.s3_fifo import S3FifoEvictor
from tiering.eviction.ttl import TtlEvictor


class EvictionPolicy(StrEnum):
    """Which block goes when a tier is full."""

    LRU = "lru"
    LFU = "lfu"
    LFUDA = "lfuda"
    ARC = "arc"
    S3_FIFO = "s3fifo"
    TTL = "ttl"


def new_evictor_of(
    policy: EvictionPolicy, ttl_s: float, clock: Callable[[], float] = time.monotonic
) -> NewEvictor:
    """The maker of a policy's evictors. `ttl_s` and `clock` are of use to TTL only."""

    def new_ttl(num_slots: int) -> Evictor:
        return TtlEvictor(ttl_s, clock)

    makers: dict[EvictionPolicy, NewEvictor] = {
        EvictionPolicy.LRU: LruEvictor,
        EvictionPolicy.LFU: LfuEvictor,
        EvictionPolicy.LFUDA: LfudaEvictor,
        EvictionPolicy.ARC: ArcEvictor,
        EvictionPolicy.S3_FIFO: S3FifoEvictor,
        EvictionPolicy.TTL: new_ttl,
    }
    return makers[policy]
