"""FlashAttention, version 2 or 3, over the block pool: what we pass, and what it refuses.

The pool goes in as it lies: block-major, so a layer's keys are (num_blocks, block_tokens, kv_heads,
head_dim) with a stride between blocks that spans all layers. Both versions take any stride as long
as a head's elements are contiguous. Dao (2023), Shah et al. (2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch

_MAX_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of one phase of a step, span after span: S spans, R rows in all.

    rows: where they stand in the step, a slice or int64 [R]. query_bounds, context_bounds: int32
    [S + 1], running sums of rows and of context tokens. context_lens: int32 [S], tokens up to the
    span's last row. tables: int32 [S, max_blocks]. max_rows, max_context: of one span.
    """

    rows: slice | torch.Tensor
    query_bounds: torch.Tensor
    context_bounds: torch.Tensor
    context_lens: torch.Tensor
    tables: torch.Tensor
    max_rows: int
    max_context: int


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """One layer's share of the pool, (num_blocks, block_tokens, kv_heads, head_dim) each.

    `window`: how many tokens a token sees, itself included, 0 for all.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scale: float
    window: int

    @property
    def window_size(self) -> tuple[int, int]:
        """As flash-attn counts it: tokens before and after the query's own, -1 for all."""
        return (self.window - 1, 0) if self.window else (-1, 0)


class FlashAttention(Protocol):
    """One version of the library. Results are (R, heads, head_dim), causal, in the queries' type."""

    @property
    def name(self) -> str: ...  # noqa: D102  # the class says it
    @property
    def block_multiple(self) -> int:
        """Blocks hold a multiple of so many tokens."""
        ...

    def prefill(
        self, queries: torch.Tensor, packed: PackedRows, blocks: LayerBlocks
    ) -> torch.Tensor:
        """Attention of spans of several rows; `queries` (R, heads, head_dim)."""
        ...

    def decode(
        self, queries: torch.Tensor, packed: PackedRows, blocks: LayerBlocks
    ) -> torch.Tensor:
        """Attention of spans of one row each. Asks the host nothing, so a graph can record it."""
        ...


class Flash2:
    """flash-attn 2.8: paged only with blocks of 256, 512, ... tokens."""

    name = "flash2"
    block_multiple = 256

    def __init__(self, module: Any) -> None:
        """`module` is `flash_attn`."""
        self._varlen: Callable[..., torch.Tensor] = module.flash_attn_varlen_func
        self._with_cache: Callable[..., torch.Tensor] = module.flash_attn_with_kvcache

    def prefill(
        self, queries: torch.Tensor, packed: PackedRows, blocks: LayerBlocks
    ) -> torch.Tensor:
        """See the port."""
        return self._varlen(
            queries,
            blocks.keys,
            blocks.values,
            cu_seqlens_q=packed.query_bounds,
            cu_seqlens_k=packed.context_bounds,
            max_seqlen_q=packed.max_rows,
            max_seqlen_k=packed.max_context,
            softmax_scale=blocks.scale,
            causal=True,
            window_size=blocks.window_size,
            block_table=packed.tables,
        )

    def decode(
        self, queries: torch.Tensor, packed: PackedRows, blocks: LayerBlocks
    ) -> torch.Tensor:
        """See the port."""
        return _decode(self._with_cache, queries, packed, blocks, block_table=packed.tables)


class Flash3:
    """flash-attn 3 (Hopper): one function for both phases, blocks of any size."""

    name = "flash3"
    block_multiple = 1

    def __init__(self, module: Any) -> None:
        """`module` is `flash_attn_interface`."""
        self._with_cache: Callable[..., torch.Tensor] = module.flash_attn_with_kvcache

    def prefill(
        self, queries: torch.Tensor, packed: PackedRows, blocks: LayerBlocks
    ) -> torch.Tensor:
        """See the port."""
        return self._with_cache(
            queries,
            blocks.keys,
            blocks.values,
            cache_seqlens=packed.context_lens,
            page_table=packed.tables,
            cu_seqlens_q=packed.query_bounds,
            max_seqlen_q=packed.max_rows,
            softmax_scale=blocks.scale,
            causal=True,
            window_size=blocks.window_size,
        )

    def decode(
        self, queries: torch.Tensor, packed: PackedRows, blocks: LayerBlocks
    ) -> torch.Tensor:
        """See the port."""
        return _decode(self._with_cache, queries, packed, blocks, page_table=packed.tables)


def _decode(
    with_cache: Callable[..., torch.Tensor],
    queries: torch.Tensor,
    packed: PackedRows,
    blocks: LayerBlocks,
    **tables: torch.Tensor,
) -> torch.Tensor:
    """Both versions' call, which differs in the name of the tables. (R, heads, head_dim)."""
    attended = with_cache(
        queries[:, None],
        blocks.keys,
        blocks.values,
        cache_seqlens=packed.context_lens,
        softmax_scale=blocks.scale,
        causal=True,
        window_size=blocks.window_size,
        **tables,
    )
    return attended[:, 0]


# Version 3 first: where it is installed it runs (Hopper) and is the faster one.
_LIBRARIES: tuple[tuple[str, Callable[[Any], FlashAttention]], ...] = (
    ("flash_attn_interface", Flash3),
    ("flash_attn", Flash2),
)


def find_flash() -> FlashAttention | None:
    """The best version that this Python can import; None without any."""
    for module_name, version in _LIBRARIES:
        try:
            return version(import_module(module_name))
        except (ImportError, AttributeError, OSError):  # OSError: built for another CUDA
            continue
    return None


def why_not_flash(flash: FlashAttention, head_dim: int, block_tokens: int) -> str | None:
    """The reason why a model of this shape cannot run on it; None if it can."""
    if block_tokens % flash.block_multiple:
        return (
            f"{flash.name} reads blocks of a multiple of {flash.block_multiple} tokens, "
            f"and block_tokens is {block_tokens}"
        )
    if head_dim > _MAX_HEAD_DIM or head_dim % _HEAD_DIM_MULTIPLE:
        return (
            f"{flash.name} has heads of up to {_MAX_HEAD_DIM} elements, a multiple of "
            f"{_HEAD_DIM_MULTIPLE}, and head_dim is {head_dim}"
        )
    return None
