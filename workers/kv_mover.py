"""The thread that moves KV blocks between the HBM pool and the node's cache daemon."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import structlog

from pipeline.protocol.cache_use import LoadReason
from pipeline.scheduling.transfer_cost import LoadPolicy, TransferCost
from tiering.errors import LayoutMismatch, LayoutNotPacked, TieringError
from tiering.kvd.client import KvdClient
from tiering.lease import Reservation
from workers.cold_blocks import ColdBlocks
from workers.hbm_pool import HbmPool
from workers.kv_jobs import (
    Deliver,
    KvMover,
    LoadJob,
    MoverStats,
    NoCache,
    PrefetchJob,
    StoreJob,
)
from workers.kv_load import BlockLoader

__all__ = ["KvMover", "KvdMover", "NoCache"]

log = structlog.get_logger(__name__)

TRANSIENT_LIFETIME_S = 60.0  # of what only the next worker of one request can use
_FIRST_BACKOFF_S = 0.05
_LAST_BACKOFF_S = 2.0
_MISMATCH_BACKOFF_S = 30.0
_LEASE_WAIT_S = 0.5  # for a block that was just stored and went to NVMe already
_MAX_PREFETCHES = 8  # that may wait
_RUN_BLOCKS = 32  # blocks reserved and committed at once; loads wait for one such run at most


_Job = ColdBlocks | LoadJob | PrefetchJob | StoreJob


class _Span(NamedTuple):
    """Blocks to store; each holds `num_tokens` tokens."""

    keys: Sequence[bytes]
    block_ids: Sequence[int]
    num_tokens: int


class KvdMover:
    """Owns one `KvdClient` on a thread of its own; see the port `KvMover`.

    Leases are given back first, then come loads, hand-overs, prefetches piece by piece, and
    write-through. A daemon that is away makes loads misses and stores no-ops, and is asked again
    after a back-off that doubles up to 2 s; one that serves other blocks is asked every 30 s.
    """

    is_enabled = True

    def __init__(
        self,
        make_client: Callable[[], KvdClient],
        *,
        max_pending_blocks: int,
        policy: LoadPolicy = LoadPolicy.COST,
        long_share: float = 0.5,
    ) -> None:
        """`make_client` builds an unconnected client; it is called again for each connection.

        max_pending_blocks: write-through blocks that may wait; these are held in HBM meanwhile.
        long_share: of kvd's DRAM, for the blocks that one sequence leaves there and reads in place.
        """
        self._make_client = make_client
        self._max_pending_blocks = max_pending_blocks
        self._policy = policy
        self._long_share = long_share
        self._max_cold_blocks = 0
        self._client: KvdClient | None = None
        self._backoff_s = 0.0
        self._retry_at_s = 0.0
        self._given_back: deque[ColdBlocks] = deque()
        self._loads: deque[LoadJob] = deque()
        self._prefetches: deque[PrefetchJob] = deque()
        self._hand_overs: deque[StoreJob] = deque()
        self._stores: deque[StoreJob] = deque()
        self._num_pending_blocks = 0
        self._num_dropped_blocks = 0
        self._changed = threading.Condition()
        self._is_stopping = False
        self._stats = MoverStats()
        self._reasons: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="kv-mover", daemon=True)

    def start(self, pool: HbmPool, block_tokens: int, deliver: Deliver) -> None:
        """See the port."""
        self._pool = pool
        self._block_tokens = block_tokens
        self._deliver = deliver
        cost = TransferCost(pool.block_bytes / block_tokens, self._policy)
        self._loader = BlockLoader(pool, block_tokens, cost)
        self._connected_client()  # now, so that the first request finds the limits known
        self._thread.start()

    @property
    def max_cold_blocks(self) -> int:
        """See the port. What the last daemon allowed also holds while it is away."""
        return self._max_cold_blocks

    def give_back(self, cold: ColdBlocks) -> None:
        """See the port."""
        with self._changed:
            self._given_back.append(cold)
            self._changed.notify()

    def load(self, job: LoadJob) -> None:
        """See the port."""
        with self._changed:
            self._loads.append(job)
            self._changed.notify()

    def prefetch(self, job: PrefetchJob) -> None:
        """See the port."""
        with self._changed:
            if len(self._prefetches) < _MAX_PREFETCHES:
                self._prefetches.append(job)
                self._changed.notify()

    def store(self, job: StoreJob) -> bool:
        """See the port."""
        with self._changed:
            if job.sequence is not None:
                self._hand_overs.append(job)
            elif self._num_pending_blocks + len(job.block_ids) > self._max_pending_blocks:
                self._num_dropped_blocks += len(job.block_ids)
                return False
            else:
                self._stores.append(job)
                self._num_pending_blocks += len(job.block_ids)
            self._changed.notify()
        return True

    def stop(self) -> None:
        """See the port."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def stats(self) -> MoverStats:
        """See the port."""
        return replace(
            self._stats,
            is_connected=self._client is not None,
            num_pending_blocks=self._num_pending_blocks,
            num_dropped_blocks=self._num_dropped_blocks,
            load_reasons=dict(self._reasons),
        )

    def _run(self) -> None:
        while jobs := self._next_jobs():
            client = self._connected_client()
            if client is not None:
                self._move(client, jobs)
            for job in jobs:
                if isinstance(job, LoadJob | StoreJob):
                    self._deliver(job)
        self._disconnect()

    def _next_jobs(self) -> list[_Job]:
        """What goes next: one thing, or a run of write-through; empty once stopping and done."""
        lines = (self._given_back, self._loads, self._hand_overs, self._prefetches)
        with self._changed:
            while True:
                line = next((line for line in lines if line), None)
                if line is not None:
                    return [line.popleft()]
                if self._stores:
                    return self._pop_stores()
                if self._is_stopping:
                    return []
                self._changed.wait()

    def _pop_stores(self) -> list[_Job]:
        """The next run of one owner."""
        jobs: list[_Job] = []
        num_blocks = 0
        owner = self._stores[0].owner
        while (
            self._stores
            and self._stores[0].owner == owner
            and (not jobs or num_blocks < _RUN_BLOCKS)
        ):
            job = self._stores.popleft()
            jobs.append(job)
            num_blocks += len(job.block_ids)
        self._num_pending_blocks -= num_blocks
        return jobs

    def _move(self, client: KvdClient, jobs: list[_Job]) -> None:
        """Run jobs of one kind; what fails is a miss or a dropped store, never an error."""
        try:
            match jobs:
                case [LoadJob() as job]:
                    if not job.is_abandoned:
                        self._load(client, job)
                case [PrefetchJob() as job]:
                    self._prefetch(client, job)
                case [ColdBlocks() as cold]:
                    cold.let_go(client)
                case [StoreJob() as job] if job.sequence is not None:
                    self._hand_over(client, job)
                case _:
                    self._write_through(client, [job for job in jobs if isinstance(job, StoreJob)])
        except TieringError as error:
            self._lose_connection(error)
        except Exception:
            # The edge of this thread: were it to die, every sequence would wait for its blocks.
            log.exception("kv_move_failed", num_jobs=len(jobs))
            self._lose_connection(None)

    def _load(self, client: KvdClient, job: LoadJob) -> None:
        if job.cold is not None and not self._max_cold_blocks:
            return  # a step could not read them
        started_s = time.perf_counter()
        try:
            report = self._loader.load(client, job)
        except TieringError:
            job.reason = LoadReason.UNAVAILABLE
            raise
        self._count(
            num_truncated_loads=int(report.is_truncated),
            num_loaded_blocks=job.num_loaded + bool(job.num_tail_tokens),
            num_loaded_bytes=report.num_bytes,
            load_busy_s=time.perf_counter() - started_s,
            num_promoted_bytes=report.num_promoted_bytes,
            promotion_s=report.promotion_s,
        )
        self._reasons[str(job.reason)] += 1

    def _prefetch(self, client: KvdClient, job: PrefetchJob) -> None:
        if not job.is_abandoned:
            self._count(num_prefetched_blocks=self._loader.prefetch(client, job))
        if job.keys and not (job.is_abandoned or self._is_stopping):
            with self._changed:
                self._prefetches.appendleft(job)

    def _hand_over(self, client: KvdClient, job: StoreJob) -> None:
        num_full = len(job.keys)
        lifetime_s = TRANSIENT_LIFETIME_S if job.is_private else None
        for start in range(0, num_full, _RUN_BLOCKS):
            end = min(start + _RUN_BLOCKS, num_full)
            full = _Span(job.keys[start:end], job.block_ids[start:end], self._block_tokens)
            if job.is_abandoned or not self._store_own(client, job, full, lifetime_s):
                return
        if job.tail_key is not None and not job.is_abandoned:
            tail = _Span([job.tail_key], job.block_ids[num_full:], job.num_tail_tokens)
            job.num_stored += self._store(client, tail, job.owner, TRANSIENT_LIFETIME_S)

    def _store_own(
        self, client: KvdClient, job: StoreJob, span: _Span, lifetime_s: float | None
    ) -> bool:
        """Store some blocks of one sequence, and lease them if they are to stay; False to stop there."""
        job.num_stored += self._store(client, span, job.owner, lifetime_s, job.cold)
        if not job.is_cooling or job.cold is None:
            return True
        keys = span.keys if self._max_cold_blocks else []  # a step could not read them
        num_leased = len(job.cold.extend(client, keys, _LEASE_WAIT_S))
        job.num_cooled += num_leased
        return num_leased == len(span.keys)

    def _write_through(self, client: KvdClient, jobs: list[StoreJob]) -> None:
        keys = [key for job in jobs for key in job.keys]
        block_ids = [block_id for job in jobs for block_id in job.block_ids]
        self._store(client, _Span(keys, block_ids, self._block_tokens), jobs[0].owner, None)

    def _store(
        self,
        client: KvdClient,
        span: _Span,
        owner: bytes,
        lifetime_s: float | None,
        cold: ColdBlocks | None = None,
    ) -> int:
        """Write the blocks that kvd lacks and has room for; published all at once or not at all.

        Nothing is published that may have been read from lost cold blocks. On an error the caller
        drops the connection, which makes kvd abort the reservations.
        """
        started_s = time.perf_counter()
        reservations = client.reserve(span.keys, lifetime_s=lifetime_s, owner=owner)
        granted: list[Reservation] = []
        wanted: list[int] = []
        for reservation, block_id in zip(reservations, span.block_ids, strict=True):
            if reservation is not None:
                granted.append(reservation)
                wanted.append(block_id)
        for reservation, data in zip(granted, self._pool.read(wanted), strict=True):
            client.write(reservation, data, span.num_tokens)
        if cold is not None and not cold.are_kept:
            client.abort(granted)
            return 0
        num_stored = client.commit(granted) if granted else 0
        self._count(
            num_stored_blocks=num_stored,
            num_stored_bytes=num_stored * self._pool.block_bytes,
            store_busy_s=time.perf_counter() - started_s,
        )
        return num_stored

    def _connected_client(self) -> KvdClient | None:
        """A connected client; None while the daemon is away and the back-off runs."""
        if self._client is not None and self._client.has_hung_up:
            self._disconnect()  # by a restart, mostly: the new one answers at once
        if self._client is not None:
            return self._client
        if time.monotonic() < self._retry_at_s:
            return None
        client = self._make_client()
        try:
            client.connect()
        except (LayoutMismatch, LayoutNotPacked) as error:
            log.warning("kvd_layout_mismatch", reason=str(error), retry_in_s=_MISMATCH_BACKOFF_S)
            self._retry_at_s = time.monotonic() + _MISMATCH_BACKOFF_S
            return None
        except TieringError as error:
            self._lose_connection(error)
            return None
        self._client = client
        self._backoff_s = 0.0
        self._max_cold_blocks = self._reach(client)
        return client

    def _reach(self, client: KvdClient) -> int:
        """Let steps read kvd's DRAM in place; how many of its blocks one sequence may leave there."""
        slab = client.shared_slab
        if slab is None or not self._long_share or not self._pool.attach(slab):
            return 0
        return int(self._long_share * slab.num_slots)

    def _lose_connection(self, error: TieringError | None) -> None:
        self._disconnect()
        self._backoff_s = min(max(2 * self._backoff_s, _FIRST_BACKOFF_S), _LAST_BACKOFF_S)
        self._retry_at_s = time.monotonic() + self._backoff_s
        self._count(num_unavailable=1)
        if error is not None:
            log.warning("kvd_lost", reason=str(error), retry_in_s=self._backoff_s)

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
            self._pool.detach()

    def _count(self, **changes: float) -> None:
        """Add to the counters; called on the mover's thread only."""
        sums = {name: getattr(self._stats, name) + change for name, change in changes.items()}
        self._stats = replace(self._stats, **sums)
