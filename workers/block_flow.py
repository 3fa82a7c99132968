"""What happens to a sequence's blocks before it runs, after each step, and at its hand-over."""

from __future__ import annotations

from collections.abc import Iterable

from tiering.block_hash import KeyChain, private_root, tail_key
from workers.block_table import BlockPool
from workers.cold_blocks import ColdBlocks
from workers.kv_jobs import KvMover, LoadJob, PrefetchJob, StoreJob
from workers.sequence import Sequence
from workers.sequence_run import SequenceRun
from workers.settings import EngineSettings


class BlockFlow:
    """The engine's side of all block moves: names blocks, holds those that a move touches.

    A block is named (registered in HBM, offered to the tiers) only once its KV went through
    `forward`; the last sampled token has none (vllm#54193 stored it and poisoned the cache). A
    block in a move has a holder until the mover has answered.
    """

    def __init__(self, blocks: BlockPool, mover: KvMover, settings: EngineSettings) -> None:
        self._blocks = blocks
        self._mover = mover
        self._block_tokens = settings.block_tokens
        self._keeps_in_hbm = settings.prefix_cache
        self._moving: dict[LoadJob | StoreJob, SequenceRun | None] = {}

    @property
    def is_busy(self) -> bool:
        """True while the mover owes an answer."""
        return bool(self._moving)

    @property
    def num_handing_over(self) -> int:
        """Hand-overs under way."""
        jobs = (job for job, run in self._moving.items() if run)
        stores = (job for job in jobs if isinstance(job, StoreJob))
        return sum(not (job.is_spill or job.is_cooling) for job in stores)

    def name_blocks(self, run: SequenceRun) -> None:
        """Compute the keys of the known full blocks.

        A sequence that may leave no trace has keys that nobody else can have, and for moves between
        its own workers only.
        """
        sequence = run.sequence
        if self._mover.is_enabled or (self._keeps_in_hbm and sequence.uses_cache):
            root = sequence.key_root
            if not sequence.uses_cache:
                root = private_root(root, sequence.request_id)
            run.chain = KeyChain(root)
            run.sequence.block_keys = []
            run.extend_keys(len(run.sequence.tokens), self._block_tokens)

    def prefetch(self, run: SequenceRun, prefill_tokens_per_s: float) -> None:
        """Have the tiers bring up what a waiting run will want; once per wait."""
        if run.prefetch is not None or run.chain is None or not self._mover.is_enabled:
            return
        if run.needs_scoring or not run.sequence.uses_cache:
            return
        run.prefetch = PrefetchJob(run.reusable_keys(self._block_tokens))
        self.foresee(run.prefetch, prefill_tokens_per_s)

    def foresee(self, job: PrefetchJob, prefill_tokens_per_s: float) -> None:
        """The same for blocks by their keys; what HBM has is taken out of the job."""
        job.keys = job.keys[len(self._blocks.match(job.keys)) :]
        job.prefill_tokens_per_s = prefill_tokens_per_s
        if job.keys and self._mover.is_enabled:
            self._mover.prefetch(job)

    def begin_load(self, run: SequenceRun, prefill_tokens_per_s: float) -> bool:
        """Ask the tiers for what HBM lacked of an admitted run; False if there is nothing to ask.

        The job reads and writes only blocks that the run holds; the engine keeps them until then.
        """
        run.end_prefetch()
        if run.chain is None or not self._mover.is_enabled or run.needs_scoring:
            return False
        sequence = run.sequence
        num_here = run.num_settled_blocks
        keys = run.reusable_keys(self._block_tokens)[num_here:]
        tail = _fitting_tail(sequence, self._block_tokens)
        if not keys and tail is None:
            return False
        num_blocks = len(keys) + (tail is not None)
        run.job = LoadJob(
            sequence=sequence,
            keys=keys,
            block_ids=sequence.block_ids[num_here : num_here + num_blocks],
            tail_key=tail,
            is_private=not sequence.uses_cache,
            cold=run.long.cold if run.long is not None else None,
            prefill_tokens_per_s=prefill_tokens_per_s,
        )
        self._moving[run.job] = run
        self._mover.load(run.job)
        return True

    def finish(self, job: LoadJob | StoreJob) -> SequenceRun | None:
        """Take the mover's answer; the run whose own blocks were moved, None for write-through."""
        run = self._moving.pop(job)
        if run is None:
            self._blocks.release(job.block_ids)
        else:
            run.job = None
        return run

    def count_loaded(self, job: LoadJob, run: SequenceRun) -> None:
        """Count the verified head run as computed; what failed is computed again."""
        sequence = run.sequence
        num_loaded = job.num_loaded
        if run.long is not None:
            sequence.block_ids[:0] = self._behind_pool(run.long.cold, 0)
            run.long.num_cold = num_loaded
            run.num_tabled = 0
        elif self._keeps_in_hbm and sequence.uses_cache:
            for number in range(num_loaded):
                self._blocks.register(job.block_ids[number], job.keys[number])
        run.num_settled_blocks += num_loaded
        sequence.num_computed = run.num_settled_blocks * self._block_tokens
        if num_loaded == len(job.keys) and job.tail_key is not None:
            num_missing = len(sequence.tokens) - 1 - sequence.num_computed
            if job.num_tail_tokens == num_missing:
                sequence.num_computed += num_missing
        run.count_load(job, self._block_tokens)

    def settle(self, runs: Iterable[SequenceRun]) -> None:
        """After a step: register blocks that became full, and write them through to the tiers."""
        jobs: dict[bytes, StoreJob] = {}
        for run in runs:
            sequence = run.sequence
            num_full = sequence.num_computed // self._block_tokens
            if run.chain is None or num_full <= run.num_settled_blocks:
                continue
            if not sequence.uses_cache:
                continue
            owner = sequence.owner
            job = jobs.setdefault(owner, StoreJob(keys=[], block_ids=[], owner=owner))
            run.extend_keys(sequence.num_computed, self._block_tokens)
            for index in range(run.num_settled_blocks, num_full):
                key, block_id = sequence.block_keys[index], sequence.block_ids[index]
                if not self._keeps_in_hbm or self._blocks.register(block_id, key):
                    job.keys.append(key)
                    job.block_ids.append(block_id)
            run.num_settled_blocks = num_full
        for job in jobs.values():
            if job.keys and self._mover.is_enabled and self._mover.store(job):
                self._blocks.hold(job.block_ids)
                self._moving[job] = None

    def begin_cooling(self, run: SequenceRun, num_blocks: int) -> None:
        """Have the first of a long run's full blocks in the pool stay in DRAM instead."""
        if run.long is None:
            return
        sequence, start = run.sequence, run.long.num_cold
        run.extend_keys(sequence.num_computed, self._block_tokens)
        run.job = StoreJob(
            keys=sequence.block_keys[start : start + num_blocks],
            block_ids=sequence.block_ids[start : start + num_blocks],
            owner=sequence.owner,
            sequence=sequence,
            is_private=not sequence.uses_cache,
            cold=run.long.cold,
            is_cooling=True,
        )
        self._moving[run.job] = run
        self._mover.store(run.job)

    def swap_cooled(self, job: StoreJob, run: SequenceRun) -> None:
        """Read what has come to DRAM from there, and give its blocks of the pool back."""
        if run.long is None or not job.num_cooled:
            return
        start = run.long.num_cold
        cooled = slice(start, start + job.num_cooled)
        self._blocks.release(run.sequence.block_ids[cooled])
        run.sequence.block_ids[cooled] = self._behind_pool(run.long.cold, start)
        run.num_tabled = min(run.num_tabled, start)

    def _behind_pool(self, cold: ColdBlocks, start: int) -> list[int]:
        """The block ids of cold blocks, see `HbmPool.attach`."""
        return [self._blocks.num_total + slot for slot in cold.slots[start:]]

    def begin_hand_over(self, run: SequenceRun) -> bool:
        """Bring all KV of the run to the tiers, the partial tail block too; False if it cannot be.

        The run's own blocks are stored in place: it takes part in no step any more.
        """
        run.sequence.tail_key = None
        if run.chain is None or not self._mover.is_enabled:
            return False
        self._store_whole(run, is_spill=False)
        return True

    def begin_spill(self, run: SequenceRun) -> None:
        """The same for a preempted run that has a chain: a hand-over to itself."""
        run.sequence.tail_key = None
        self._store_whole(run, is_spill=True)

    def _store_whole(self, run: SequenceRun, *, is_spill: bool) -> None:
        """All that is computed; of a prompt that is not, a partial block would fit nowhere."""
        sequence = run.sequence
        run.extend_keys(sequence.num_computed, self._block_tokens)
        num_full, num_tail = divmod(sequence.num_computed, self._block_tokens)
        if run.num_pending > 1:
            num_tail = 0
        if num_tail:
            sequence.tail_key = tail_key(
                sequence.key_root, sequence.request_id, sequence.attempt, sequence.num_computed
            )
        run.job = StoreJob(
            keys=sequence.block_keys[:num_full],
            block_ids=sequence.block_ids[: num_full + (num_tail > 0)],
            owner=sequence.owner,
            sequence=sequence,
            tail_key=sequence.tail_key,
            num_tail_tokens=num_tail,
            is_private=not sequence.uses_cache,
            is_spill=is_spill,
            cold=run.long.cold if run.long is not None else None,
        )
        self._moving[run.job] = run
        self._mover.store(run.job)


def _fitting_tail(sequence: Sequence, block_tokens: int) -> bytes | None:
    """The sequence's tail key if its block ends exactly where the last known token begins.

    After a recovery the token log has grown past the hand-over, and the tail stands for another
    place. The key itself proves it: it covers the attempt that stored it, this one or an earlier,
    and the number of tokens.
    """
    num_tokens = len(sequence.tokens) - 1
    if sequence.tail_key is None or num_tokens % block_tokens == 0:
        return None
    for attempt in range(sequence.attempt + 1):
        key = tail_key(sequence.key_root, sequence.request_id, attempt, num_tokens)
        if key == sequence.tail_key:
            return key
    return None
