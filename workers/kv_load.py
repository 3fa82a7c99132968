"""One load: what the node's tiers have, whether it is worth its time, and the blocks' way into HBM."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from pipeline.protocol.cache_use import LoadReason
from pipeline.scheduling.transfer_cost import LoadPolicy, Run, TransferCost
from tiering.kvd.client import KvdClient
from tiering.lease import BlockLease
from tiering.tier import Tier
from workers.cold_blocks import ColdBlocks
from workers.hbm_pool import HbmPool
from workers.kv_jobs import LoadJob, PrefetchJob

log = structlog.get_logger(__name__)

_PIECE_BYTES, _PIECE_WAIT_S = 8 << 20, 0.1  # of a prefetch
_COLD_WAIT_S = 2.0  # for a piece as large: who gives it up computes it, and all behind it


@dataclass(slots=True)
class LoadReport:
    """What a load took, in bytes and seconds: copies out of DRAM, and NVMe's part before them."""

    num_bytes: int = 0
    copy_s: float = 0.0
    num_promoted_bytes: int = 0
    promotion_s: float = 0.0
    is_truncated: bool = False


class BlockLoader:
    """Serves load jobs, one at a time, on the mover's thread.

    Errors of the client are the caller's: the job then tells what it got before. Every load has a
    deadline: one that is late keeps the verified head run that has come.
    """

    def __init__(self, pool: HbmPool, block_tokens: int, cost: TransferCost) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._cost = cost

    def load(self, client: KvdClient, job: LoadJob) -> LoadReport:
        """Load what is worth it; the job tells how far it came and why."""
        began_s = time.perf_counter()
        wanted = job.keys if job.tail_key is None else [*job.keys, job.tail_key]
        num_dram, num_all = client.locate(wanted)
        job.num_found = max(job.num_found, num_all)
        if job.cold is not None:
            return self._leave(client, job, num_all, job.cold)
        choice = self._cost.choose(
            self._run(num_dram, num_all), job.prefill_tokens_per_s, time.monotonic()
        )
        job.reason = choice.reason
        job.weigh(choice)
        keys = wanted[: choice.num_tokens // self._block_tokens]
        report = LoadReport()
        if keys:
            self._bring(client, job, keys, began_s + choice.limit_s, report)
            if len(keys) <= num_dram:
                report.promotion_s = 0.0  # nothing was waited for
            took_s = time.perf_counter() - began_s
            job.taken_s += took_s
            fixed_s = took_s - report.copy_s - report.promotion_s
            self._cost.count_copy(report.num_bytes, report.copy_s, fixed_s, time.monotonic())
            self._cost.count_promotion(report.num_promoted_bytes, report.promotion_s)
        if job.is_private:
            client.discard(wanted)
        elif job.num_tail_tokens and job.tail_key is not None:
            client.discard([job.tail_key])
        return report

    def prefetch(self, client: KvdClient, job: PrefetchJob) -> int:
        """Bring a piece of what a waiting run wants up from NVMe; how many blocks.

        A piece, for a load that comes meanwhile must not find the disk busy with all of it. The job
        keeps the keys that are left, or none if going on is of no use.
        """
        num_dram, num_all = client.locate(job.keys)
        run = self._run(num_dram, num_all)
        choice = self._cost.choose(run, job.prefill_tokens_per_s, time.monotonic())
        wanted = job.keys[num_dram:num_all] if choice.num_tokens > run.dram_tokens else []
        piece = wanted[: self._piece_blocks]
        lease = client.acquire(piece, wait_s=_PIECE_WAIT_S)
        client.release(lease)
        num_came = len(lease.blocks)
        job.keys = wanted[num_came:] if num_came else []
        return num_came

    def _leave(
        self, client: KvdClient, job: LoadJob, num_found: int, cold: ColdBlocks
    ) -> LoadReport:
        """Have the full blocks stay in DRAM, for steps to read there, and load the tail alone.

        There is nothing to weigh: a block that is not copied costs its way up from NVMe at most.
        """
        is_never = self._cost.policy is LoadPolicy.NEVER
        job.reason = LoadReason.NEVER if is_never else LoadReason.ABSENT
        if is_never:
            return LoadReport()
        keys = job.keys[:num_found]
        began_s = time.perf_counter()
        for start in range(0, len(keys), self._piece_blocks):
            piece = keys[start : start + self._piece_blocks]
            came = [] if job.is_abandoned else cold.extend(client, piece, _COLD_WAIT_S)
            job.num_loaded += len(came)
            job.num_from_nvme += sum(block.tier is Tier.NVME for block in came)
            job.num_from_peer += sum(start + n in job.pulled for n in range(len(came)))
            job.reason = LoadReason.FASTER if len(came) == len(piece) else LoadReason.GONE
            if len(came) < len(piece):
                break
        if job.tail_key is not None and num_found > job.num_loaded == len(job.keys):
            self._bring_tail(client, job, job.tail_key)
        job.taken_s += time.perf_counter() - began_s
        return LoadReport()

    def _bring_tail(self, client: KvdClient, job: LoadJob, key: bytes) -> None:
        lease = client.acquire([key], wait_s=_COLD_WAIT_S)
        try:
            if lease.blocks and client.load(lease, 0, self._pool.begin_write(job.block_ids[0])):
                self._pool.finish_write(job.block_ids[0])
                job.num_tail_tokens = lease.blocks[0].num_tokens
        finally:
            self._pool.settle()
            client.release(lease)
        client.discard([key])

    @property
    def _piece_blocks(self) -> int:
        return max(_PIECE_BYTES // self._pool.block_bytes, 1)

    def _run(self, num_dram: int, num_all: int) -> Run:
        return Run(num_dram * self._block_tokens, (num_all - num_dram) * self._block_tokens)

    def _bring(
        self,
        client: KvdClient,
        job: LoadJob,
        keys: Sequence[bytes],
        limit_s: float,
        report: LoadReport,
    ) -> None:
        """Copy the head run of `keys` that is there by `limit_s` (on `perf_counter`)."""
        asked_s = time.perf_counter()
        lease = client.acquire(keys, wait_s=max(limit_s - asked_s, 0.0))
        acquired_s = time.perf_counter()
        num_promoted = sum(block.tier is Tier.NVME for block in lease.blocks)
        report.num_promoted_bytes = num_promoted * self._pool.block_bytes
        report.promotion_s = acquired_s - asked_s
        try:
            num_copied = self._copy(client, job, lease, limit_s, report)
        finally:
            self._pool.settle()
            report.copy_s = time.perf_counter() - acquired_s
            client.release(lease)
        report.num_bytes = num_copied * self._pool.block_bytes
        if num_copied < len(keys) and not job.is_abandoned:
            job.reason = _cut_reason(report, is_late=time.perf_counter() > limit_s)

    def _copy(
        self,
        client: KvdClient,
        job: LoadJob,
        lease: BlockLease,
        limit_s: float,
        report: LoadReport,
    ) -> int:
        for index, block in enumerate(lease.blocks):
            if job.is_abandoned or time.perf_counter() > limit_s:
                return index
            block_id = job.block_ids[index]
            if not client.load(lease, index, self._pool.begin_write(block_id)):
                log.warning("kv_block_refused", tier=block.tier, num_before=index)
                report.is_truncated = True
                return index
            self._pool.finish_write(block_id)
            if index < len(job.keys):
                job.num_loaded += 1
                job.num_from_nvme += block.tier is Tier.NVME
                job.num_from_peer += block.tier is Tier.DRAM and index in job.pulled
            else:
                job.num_tail_tokens = block.num_tokens
        return len(lease.blocks)


def _cut_reason(report: LoadReport, *, is_late: bool) -> LoadReason:
    """Why less came than was chosen."""
    if report.is_truncated:
        return LoadReason.REFUSED
    return LoadReason.LATE if is_late else LoadReason.GONE
