"""A sequence together with what the engine remembers about running it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pipeline.protocol.cache_use import CacheUse
from pipeline.protocol.tokens import TokenRecord
from tiering.block_hash import KeyChain
from workers.cold_blocks import ColdBlocks
from workers.kv_jobs import LoadJob, PrefetchJob, StoreJob
from workers.logit_rules import LogitRules
from workers.model import Int32Array
from workers.prompt_lookup import PromptLookup
from workers.sequence import Sequence
from workers.stop_matching import StopMatcher


def num_blocks_for(num_tokens: int, block_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_tokens)


@dataclass(slots=True)
class LongRun:
    """What a run needs whose KV the pool does not hold.

    The head of its block table names `num_cold` blocks behind the pool, which are `cold` in the node's
    DRAM. num_stalls: moves there in a row that got nowhere; the next one is tried at `again_at_s`.
    """

    cold: ColdBlocks
    num_cold: int = 0
    num_stalls: int = 0
    again_at_s: float = 0.0


@dataclass(slots=True, eq=False)
class SequenceRun:
    """One sequence on this engine; touched by the engine thread only.

    arrival: position in the order of submission. chain: None where no block may be shared.
    num_settled_blocks: head blocks of the table that are registered for reuse already, or came from
    a tier. job: the move that still reads or writes this run's blocks, if any. table and
    num_tabled: the block table as an array, kept up to date by the batch builder. rules: None where
    no option changes logits. prompt_records: scores of the prompt so far; None where they are not
    wanted or have been told. lookup: None where nothing is guessed. long: None while the pool may hold
    all of it. num_losses: how often its cold blocks were lost.
    """

    sequence: Sequence
    arrival: int
    chain: KeyChain | None = None
    stop_matcher: StopMatcher | None = None
    num_settled_blocks: int = 0
    last_turn: int = 0
    was_admitted: bool = False
    was_started: bool = False
    job: LoadJob | StoreJob | None = None
    prefetch: PrefetchJob | None = None
    cache_use: CacheUse = field(default_factory=CacheUse)
    rules: LogitRules | None = None
    prompt_records: list[TokenRecord] | None = None
    lookup: PromptLookup | None = None
    table: Int32Array = field(default_factory=lambda: np.zeros(8, dtype=np.int32))
    num_tabled: int = 0
    long: LongRun | None = None
    num_losses: int = 0

    @property
    def num_cold(self) -> int:
        """Head blocks that are none of the pool's."""
        return self.long.num_cold if self.long is not None else 0

    @property
    def hot_block_ids(self) -> list[int]:
        """The blocks of the pool that it holds."""
        return self.sequence.block_ids[self.num_cold :]

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: smaller runs first and is preempted last."""
        return (int(self.sequence.priority), self.arrival)

    @property
    def num_pending(self) -> int:
        """Tokens without KV: the rest of the prompt, or the one last sampled."""
        return len(self.sequence.tokens) - self.sequence.num_computed

    @property
    def needs_scoring(self) -> bool:
        """True while the prompt's logits are wanted: all of it is computed, whatever is cached."""
        return self.prompt_records is not None

    def end_prefetch(self) -> None:
        """It waits no more: what was not begun for it need not be."""
        if self.prefetch is not None:
            self.prefetch.is_abandoned = True
            self.prefetch = None

    def count_load(self, job: LoadJob, block_tokens: int) -> None:
        """Note where the loaded tokens came from."""
        nvme_tokens = job.num_from_nvme * block_tokens
        peer_tokens = job.num_from_peer * block_tokens
        if len(job.keys) in job.pulled:
            peer_tokens += job.num_tail_tokens
        num_tokens = job.num_loaded * block_tokens + job.num_tail_tokens
        num_missed = max(min(job.num_found, len(job.keys)) - job.num_loaded, 0)
        self.cache_use = CacheUse(
            dram_tokens=max(num_tokens - nvme_tokens - peer_tokens, 0),
            nvme_tokens=nvme_tokens,
            peer_tokens=peer_tokens,
            recomputed_tokens=num_missed * block_tokens,
            load=job.reason,
            pull=job.pull_reason,
            peer=job.peer.node if job.peer is not None else None,
            estimated_ms=_ms(job.estimated_s),
            compute_ms=_ms(job.compute_s),
            taken_ms=_ms(job.taken_s),
        )

    def take_prompt_records(self) -> list[TokenRecord] | None:
        """The scores of the whole prompt, once; None before they are complete."""
        records = self.prompt_records
        if records is None or len(records) < self.sequence.num_prompt_tokens - 1:
            return None
        self.prompt_records = None
        return records

    def extend_keys(self, num_tokens: int, block_tokens: int) -> None:
        """Compute the keys of all full blocks within the first `num_tokens` tokens."""
        if self.chain is None:
            return
        keys = self.sequence.block_keys
        tokens = self.sequence.tokens
        for start in range(len(keys) * block_tokens, num_tokens - block_tokens + 1, block_tokens):
            keys.append(self.chain.extend(tokens[start : start + block_tokens]))

    def reusable_keys(self, block_tokens: int) -> list[bytes]:
        """Keys of the full blocks that may be taken over: the last token is always computed."""
        return self.sequence.block_keys[: (len(self.sequence.tokens) - 1) // block_tokens]

    def forget_blocks(self) -> None:
        """The caller has given the blocks back."""
        self.sequence.block_ids = []
        self.num_settled_blocks = 0
        self.num_tabled = 0
        self.long = None


def _ms(seconds: float) -> float | None:
    """None for what is not known: 0, or infinite where nothing ever came."""
    return round(seconds * 1e3, 3) if 0 < seconds < float("inf") else None
