"""Settings of a worker process, and the plain values that its engine takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from pipeline.scheduling.fleet import Role
from pipeline.scheduling.transfer_cost import LoadPolicy
from tiering.block_layout import BlockLayout
from tiering.stores.block_store import padded
from workers.model import DeviceMemory

HOST_POOL_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What one engine is allowed to hold and to do.

    num_blocks: blocks of the HBM pool. block_tokens: tokens of one block. max_batch_sequences: how
    many sequences hold blocks at once. max_batch_tokens: tokens of one step, prefill chunks and
    decode rows together. prefix_cache: full blocks stay in HBM for reuse after their sequence.
    speculation_tokens: most tokens guessed ahead for one sequence in a step; 0: none.
    max_decode_slowdown: chunks of prompts are sized so that steps beside them take at most so many
    times what decode rows take alone, unless more prompts wait than rows decode; 0: by the budget
    only, for most tokens in all.

    Raises:
        ValueError: a count is too small to make progress.
    """

    num_blocks: int
    block_tokens: int = 16
    max_batch_sequences: int = 64
    max_batch_tokens: int = 512
    max_waiting: int = 4
    prefix_cache: bool = True
    speculation_tokens: int = 0
    max_decode_slowdown: float = 0.0

    def __post_init__(self) -> None:
        if min(self.num_blocks, self.block_tokens, self.max_batch_sequences) < 1:
            raise ValueError(f"an engine needs at least one block, token and sequence: {self}")
        if self.max_decode_slowdown and self.max_decode_slowdown <= 1:
            raise ValueError(f"a slowdown is above 1, or 0 for none: {self.max_decode_slowdown}")
        if self.max_batch_tokens < 2:  # noqa: PLR2004 - one for decode, one for prefill
            raise ValueError(f"max_batch_tokens is at least 2: {self.max_batch_tokens}")

    @property
    def max_pending_blocks(self) -> int:
        """Blocks that may wait to be written through, held in HBM meanwhile: two steps at least."""
        return max(self.num_blocks // 8, 2 * self.max_batch_tokens // self.block_tokens)


class WorkerSettings(BaseSettings):
    """A worker's environment, `POINTSMAN_WORKER_*`. Read in the composition root only."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_WORKER_", frozen=True, extra="forbid")

    name: str = Field(default="", description="unique on the node; empty: from role and process")
    role: Role = Field(default=Role.BOTH, description="computes prompts, answers, or both")
    hbm_bytes: int | None = Field(
        default=None,
        ge=2**16,
        description="of the KV pool; empty: what `hbm_share` allows on a GPU, 256 MiB on a CPU",
    )
    hbm_share: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="of a GPU's memory, for weights and KV pool; `serve` shares 0.9 among its workers",
    )
    num_blocks: int | None = Field(default=None, ge=2, description="instead of `hbm_bytes`")
    block_tokens: int = Field(
        default=16, ge=1, le=1024, description="of one KV block; workers of a model agree on it"
    )
    max_batch_sequences: int = Field(
        default=64, ge=1, description="places: sequences that hold blocks at once"
    )
    max_batch_tokens: int = Field(
        default=512, ge=2, description="of one step, chunks of prompts and decode rows together"
    )
    max_waiting: int = Field(
        default=4,
        ge=1,
        description="sequences inside that wait for blocks; beyond, no message is taken",
    )
    dtype: Literal["auto", "float32", "bfloat16", "int8"] = Field(
        default="auto", description="int8: bfloat16 with products in int8; workers agree on it"
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="cuda: the extra `gpu`")
    threads: int | None = Field(
        default=None, ge=1, description="that compute on a CPU; `serve` sets cores over workers"
    )
    step_delay_ms: float = Field(default=0.0, ge=0.0, description="of the test engines")
    drain_s: float = Field(
        default=25.0, ge=0.0, description="time for running sequences at a stop; then they move"
    )
    canary_idle_s: float = Field(
        default=30.0, ge=0.0, description="idle so long, it tests itself with two tokens; 0: never"
    )
    stuck_s: float = Field(
        default=15.0,
        gt=0.0,
        description="a step this long makes it unready; three times as long ends it",
    )
    prefix_cache: bool = Field(default=True, description="full blocks stay in HBM for reuse")
    speculation_tokens: int = Field(
        default=0, ge=0, le=32, description="guessed ahead from the sequence's own text; 0: none"
    )
    max_decode_slowdown: float = Field(
        default=2.0,
        ge=0,
        description="of a step by the prompts beside it, unless more of them wait than rows decode;"
        " 0: no limit",
    )
    loads: LoadPolicy = Field(
        default=LoadPolicy.COST,
        description="cached blocks below HBM are loaded: where that is sooner, always, never",
    )
    long_share: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="of the node's DRAM tier, for one context larger than the HBM pool; 0: refused",
    )
    kvd: bool = Field(default=True, description="use the cache daemon at POINTSMAN_KVD_SOCKET")
    kvd_socket: Path | None = Field(default=None, validation_alias="POINTSMAN_KVD_SOCKET")

    def engine_settings(
        self, layout: BlockLayout, memory: DeviceMemory | None = None
    ) -> EngineSettings:
        """The engine's share, with the pool sized for blocks of this layout in a GPU's memory, or the host's.

        Raises:
            ValueError: there is room for less than two blocks.
        """
        num_bytes = self.hbm_bytes or (memory.within(self.hbm_share) if memory else HOST_POOL_BYTES)
        num_blocks = self.num_blocks or num_bytes // padded(layout.block_bytes)
        if num_blocks < 2:  # noqa: PLR2004
            raise ValueError(
                f"a KV pool of {num_bytes} bytes holds {num_blocks} blocks of {layout.block_bytes} bytes:"
                " raise hbm_bytes, or hbm_share on a GPU"
            )
        return EngineSettings(
            num_blocks=num_blocks,
            block_tokens=layout.block_tokens,
            max_batch_sequences=self.max_batch_sequences,
            max_batch_tokens=self.max_batch_tokens,
            max_waiting=self.max_waiting,
            prefix_cache=self.prefix_cache,
            speculation_tokens=self.speculation_tokens,
            max_decode_slowdown=self.max_decode_slowdown,
        )
