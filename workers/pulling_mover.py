"""Loads that may come from another node: pulled into this node's tiers first, then loaded as usual."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import structlog

from pipeline.protocol.cache_use import LoadReason
from pipeline.scheduling.transfer_cost import LoadPolicy, Run, TransferCost
from tiering.errors import TieringError
from tiering.kvd.client import KvdClient
from workers.cold_blocks import ColdBlocks
from workers.hbm_pool import HbmPool
from workers.kv_jobs import Deliver, KvMover, LoadJob, MoverStats, PrefetchJob, StoreJob
from workers.sequence import Peer

log = structlog.get_logger(__name__)

_SURVEY_S = 0.2  # for all peers together
_TRIAL_BLOCKS = 8  # pulled to measure a link before it is trusted with more
_MAX_LINKS = 64
_RETRY_S = 1.0


class PullingMover:
    """A `KvMover` around another one; see the port.

    Whether a pull is worth its time is asked of `TransferCost`, one for each peer, whose rate is the
    link's, at first as `pointsman link-test` found it. A link that is not known, or not known any more,
    is measured with a few blocks first. A
    pull has a thread and a connection of its own, so that loads from this node do not wait for it.
    """

    is_enabled = True

    def __init__(
        self, mover: KvMover, make_client: Callable[[], KvdClient], policy: LoadPolicy
    ) -> None:
        self._mover = mover
        self._make_client = make_client
        self._policy = policy
        self._client: KvdClient | None = None
        self._retry_at_s = 0.0
        self._links: OrderedDict[str, TransferCost] = OrderedDict()
        self._jobs: deque[LoadJob] = deque()
        self._changed = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-puller", daemon=True)

    def start(self, pool: HbmPool, block_tokens: int, deliver: Deliver) -> None:
        """See the port."""
        self._block_tokens = block_tokens
        self._token_bytes = pool.block_bytes / block_tokens
        self._mover.start(pool, block_tokens, deliver)
        self._thread.start()

    def load(self, job: LoadJob) -> None:
        """See the port."""
        if not job.sequence.peers:
            self._mover.load(job)
            return
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def prefetch(self, job: PrefetchJob) -> None:
        """See the port."""
        self._mover.prefetch(job)

    def store(self, job: StoreJob) -> bool:
        """See the port."""
        return self._mover.store(job)

    @property
    def max_cold_blocks(self) -> int:
        """See the port."""
        return self._mover.max_cold_blocks

    def give_back(self, cold: ColdBlocks) -> None:
        """See the port."""
        self._mover.give_back(cold)

    def stop(self) -> None:
        """See the port."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._mover.stop()

    def stats(self) -> MoverStats:
        """See the port."""
        return self._mover.stats()

    # the thread

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            if not (job.is_abandoned or self._is_stopping):
                self._pull_safely(job)
            self._mover.load(job)
        self._disconnect()

    def _next_job(self) -> LoadJob | None:
        with self._changed:
            while not self._jobs and not self._is_stopping:
                self._changed.wait()
            return self._jobs.popleft() if self._jobs else None

    def _pull_safely(self, job: LoadJob) -> None:
        """A pull that fails is a miss."""
        try:
            client = self._connected_client()
            if client is not None:
                self._pull(client, job)
        except TieringError as error:
            job.pull_reason = LoadReason.UNAVAILABLE
            log.warning("kv_pull_failed", reason=str(error), retry_in_s=_RETRY_S)
            self._retry_at_s = time.monotonic() + _RETRY_S
            self._disconnect()

    def _pull(self, client: KvdClient, job: LoadJob) -> None:
        keys = job.keys if job.tail_key is None else [*job.keys, job.tail_key]
        num_here = client.find(keys)
        if num_here == len(keys):
            return
        peers = {peer.address: peer for peer in job.sequence.peers}
        offers = client.survey(keys, list(peers), wait_s=_SURVEY_S)
        best = max(offers, key=lambda offer: offer.num_blocks)
        link = self._link_to(peers[best.peer])
        job.num_found = max(num_here, best.num_blocks)
        job.pulled = range(num_here, num_here)
        for may_try in (True, False):
            if num_here >= best.num_blocks or job.is_abandoned:
                return
            run = Run((best.num_blocks - num_here) * self._block_tokens, 0)
            choice = link.choose(run, job.prefill_tokens_per_s, time.monotonic())
            job.peer, job.pull_reason = peers[best.peer], choice.reason
            job.weigh(choice)
            if not choice.num_tokens:
                return
            end = best.num_blocks
            if may_try and choice.reason in (LoadReason.UNMEASURED, LoadReason.PROBE):
                end = min(num_here + _TRIAL_BLOCKS, end)
            asked_s = time.perf_counter()
            result = client.pull(keys[:end], [best.peer], wait_s=choice.limit_s)
            is_late = time.perf_counter() - asked_s >= choice.limit_s
            moved_s = max(result.seconds - best.seconds, 1e-6)
            link.count_copy(result.num_bytes, moved_s, best.seconds, time.monotonic())
            job.taken_s += result.seconds
            job.pulled = range(job.pulled.start, result.num_found)
            log.debug(
                "blocks_pulled",
                peer=job.peer.node,
                reason=str(choice.reason),
                num_blocks=result.num_blocks,
                num_wanted=end - num_here,
                seconds=result.seconds,
                prefill_tokens_per_s=job.prefill_tokens_per_s,
            )
            if result.num_found < end:  # the rest is computed
                job.pull_reason = LoadReason.LATE if is_late else LoadReason.GONE
                return
            num_here = result.num_found

    def _link_to(self, peer: Peer) -> TransferCost:
        link = self._links.get(peer.address)
        if link is None:
            link = self._links[peer.address] = TransferCost(self._token_bytes, self._policy)
            if peer.link is not None:
                link.expect(peer.link.bytes_per_s, peer.link.round_trip_s, time.monotonic())
        self._links.move_to_end(peer.address)
        if len(self._links) > _MAX_LINKS:
            self._links.popitem(last=False)
        return link

    def _connected_client(self) -> KvdClient | None:
        if self._client is None and time.monotonic() >= self._retry_at_s:
            client = self._make_client()
            client.connect()
            self._client = client
        return self._client

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
