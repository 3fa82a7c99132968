"""Moves of KV blocks between the HBM pool and the node's tiers, as the engine asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.protocol.cache_use import LoadReason
from pipeline.scheduling.transfer_cost import Choice
from workers.cold_blocks import ColdBlocks
from workers.hbm_pool import HbmPool
from workers.sequence import Peer, Sequence


@dataclass(slots=True, eq=False)
class LoadJob:
    """Load the head run of `keys` that the tiers hold into `block_ids`, one block per key.

    tail_key: a partial block to load into block_ids[len(keys)], only behind a complete run, and
    dropped from the tiers once it is here. is_private: so are all others; nobody else can use them.
    cold: the full blocks are not copied but stay in DRAM, added to these; block_ids holds the tail's alone.
    The engine sets `is_abandoned`; the mover then stops at
    the next block. The mover answers every job, after which it touches the blocks no more:
    num_loaded full blocks are verified and in place, num_tail_tokens tokens of the tail (0: none);
    num_from_nvme of the full blocks were not in DRAM; num_from_peer came from `peer` for this job, who
    brought the `pulled` ones of the run to DRAM.
    prefill_tokens_per_s: what recomputing is measured at (0: not known). reason, pull_reason: see
    `CacheUse.load` and `pull`. num_found: blocks of the head run that a tier or a peer had. The
    seconds are about load and pull together: predicted to load, predicted to compute, taken.
    """

    sequence: Sequence
    keys: list[bytes]
    block_ids: list[int]
    tail_key: bytes | None = None
    is_private: bool = False
    cold: ColdBlocks | None = None
    is_abandoned: bool = False
    prefill_tokens_per_s: float = 0.0
    num_loaded: int = 0
    num_tail_tokens: int = 0
    num_from_nvme: int = 0
    num_from_peer: int = 0
    num_found: int = 0
    pulled: range = range(0)
    peer: Peer | None = None
    reason: LoadReason = LoadReason.UNAVAILABLE
    pull_reason: LoadReason | None = None
    estimated_s: float = 0.0
    compute_s: float = 0.0
    taken_s: float = 0.0

    def weigh(self, choice: Choice) -> None:
        """A decision was taken about it."""
        self.estimated_s += choice.load_s
        self.compute_s = max(self.compute_s, choice.compute_s)


@dataclass(slots=True, eq=False)
class PrefetchJob:
    """Bring blocks that a waiting sequence will want from NVMe to DRAM; nobody hears of its end.

    The engine sets `is_abandoned` when the sequence waits no more.
    """

    keys: list[bytes]
    prefill_tokens_per_s: float = 0.0
    is_abandoned: bool = False


@dataclass(slots=True, eq=False)
class StoreJob:
    """Store full, computed blocks under their keys, where the tiers lack them and have room.

    sequence: whose hand-over this is, or with is_spill whose preemption, or with is_cooling whose full
    blocks shall stay in DRAM, added to `cold`: num_cooled of them did. Such a job is never dropped
    and goes before write-through. cold: what lies in DRAM of the sequence; `block_ids` may name it.
    owner: whom the blocks count for. tail_key, num_tail_tokens: the last of `block_ids` is a partial
    block with so many tokens, kept for a limited time only; is_private: so are all. The mover answers
    every job it took; num_stored blocks were written.
    """

    keys: list[bytes]
    block_ids: list[int]
    owner: bytes = b""
    sequence: Sequence | None = None
    tail_key: bytes | None = None
    num_tail_tokens: int = 0
    is_private: bool = False
    is_spill: bool = False
    cold: ColdBlocks | None = None
    is_cooling: bool = False
    is_abandoned: bool = False
    num_stored: int = 0
    num_cooled: int = 0


@dataclass(frozen=True, slots=True)
class MoverStats:
    """Counters since the start, and what is pending now.

    num_truncated_loads: runs cut short by a block that failed its check or a daemon that went
    away. num_dropped_blocks: write-through blocks given up because the mover was behind.
    load_reasons: loads by what became of them. promoted_bytes, promotion_s: the part of NVMe in
    loads, waited for before their copies.
    """

    is_connected: bool = False
    num_loaded_blocks: int = 0
    num_stored_blocks: int = 0
    num_dropped_blocks: int = 0
    num_truncated_loads: int = 0
    num_unavailable: int = 0
    num_pending_blocks: int = 0
    num_loaded_bytes: int = 0
    num_stored_bytes: int = 0
    load_busy_s: float = 0.0
    store_busy_s: float = 0.0
    num_promoted_bytes: int = 0
    promotion_s: float = 0.0
    num_prefetched_blocks: int = 0
    load_reasons: Mapping[str, int] = field(default_factory=dict)


Deliver = Callable[[LoadJob | StoreJob], None]


class KvMover(Protocol):
    """Moves blocks in the background. All methods are called on the engine thread.

    A block named in a job that was taken stays held by the engine until the job is delivered.
    """

    @property
    def is_enabled(self) -> bool:
        """False: there is no tier below HBM; nothing may be submitted."""
        ...

    @property
    def max_cold_blocks(self) -> int:
        """Blocks that one sequence may leave in DRAM and read there; 0: none, or not known yet."""
        ...

    def start(self, pool: HbmPool, block_tokens: int, deliver: Deliver) -> None:
        """Take the pool. `deliver` may be called on any thread."""
        ...

    def load(self, job: LoadJob) -> None:
        """Take the job; loads go before stores."""
        ...

    def prefetch(self, job: PrefetchJob) -> None:
        """Take the job, or drop it where too many wait; it goes behind loads and hand-overs."""
        ...

    def store(self, job: StoreJob) -> bool:
        """Take the job; False: dropped, for the mover is behind (never a hand-over)."""
        ...

    def give_back(self, cold: ColdBlocks) -> None:
        """End the leases of blocks that no step will read any more."""
        ...

    def stop(self) -> None:
        """Deliver every job that was taken, then let go of the pool."""
        ...

    def stats(self) -> MoverStats:
        """Counters; any thread."""
        ...


@dataclass(slots=True)
class NoCache:
    """The mover of a worker without a cache daemon: HBM is the only tier."""

    is_enabled: bool = field(default=False, init=False)
    max_cold_blocks: int = field(default=0, init=False)

    def start(self, pool: HbmPool, block_tokens: int, deliver: Deliver) -> None:
        """See the port; nothing is moved."""

    def load(self, job: LoadJob) -> None:
        """Refused: see `is_enabled`."""
        raise NoTierBelow

    def prefetch(self, job: PrefetchJob) -> None:
        """Dropped: there is nothing to fetch from."""

    def store(self, job: StoreJob) -> bool:
        """Dropped: there is nowhere to store."""
        del job
        return False

    def give_back(self, cold: ColdBlocks) -> None:
        """See the port; there are none."""

    def stop(self) -> None:
        """See the port."""

    def stats(self) -> MoverStats:
        """See the port; all zero."""
        return MoverStats()


class NoTierBelow(Exception):
    """A load was submitted to a mover that has no tier; a fault of the caller."""
