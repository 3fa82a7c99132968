"""Attention over the block pool on the CPU, in plain torch: gather a context, then attend to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from tiering.block_layout import BlockLayout
from workers.model import ByteArray, StepBatch

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's tokens of a step, [start, end) of T, and where its context lies.

    `block_rows`: int64 (num_layers, 2 * num_blocks), rows of the pool seen as (rows, block_tokens *
    kv_heads * head_dim), all key blocks before all value blocks. `mask`: bool (end - start,
    context_tokens), only for several tokens after a prefix.
    """

    start: int
    end: int
    context_tokens: int
    block_rows: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of a step share. `token_rows`: int64 (num_layers, T, 2), see `PagedKv`."""

    spans: list[Span]
    token_rows: torch.Tensor


class PagedKv:
    """The block pool as keys and values.

    Shape (num_blocks, num_layers, 2, block_tokens, kv_heads, head_dim), a view of the bytes that
    the worker moves between tiers. Seen as rows of one token, (rows, kv_heads * head_dim), a step
    writes by row number; seen as rows of one block it reads, so that a gather copies whole runs.
    """

    def __init__(self, pool: ByteArray, layout: BlockLayout) -> None:
        """`pool` is uint8 (num_blocks, layout.block_bytes), C order, and stays shared."""
        values = torch.from_numpy(pool).view(TORCH_DTYPES[layout.dtype])
        self._layout = layout
        self._token_width = layout.num_kv_heads * layout.head_dim
        self._by_token = values.view(-1, self._token_width)
        self._by_block = values.view(-1, layout.block_tokens * self._token_width)
        self._gathered = values.new_empty((0, layout.block_tokens * self._token_width))
        self._layers = torch.arange(layout.num_layers)

    def plan(self, batch: StepBatch) -> AttentionPlan:
        """Row numbers and masks of a step, for all layers at once."""
        layout = self._layout
        slots = torch.from_numpy(batch.slot_mapping)
        blocks, offsets = slots // layout.block_tokens, slots % layout.block_tokens
        runs = (blocks * layout.num_layers + self._layers[:, None]) * 2  # of one layer's keys
        rows = runs[:, :, None] + torch.arange(2)
        bounds = batch.cu_query_lens.tolist()
        spans = [
            self._span(batch, row, bounds[row], bounds[row + 1]) for row in range(len(bounds) - 1)
        ]
        most = max(span.block_rows.shape[1] for span in spans)
        if most > len(self._gathered):
            self._gathered = self._gathered.new_empty((most * 3 // 2, self._gathered.shape[1]))
        return AttentionPlan(spans, rows * layout.block_tokens + offsets[:, None])

    def store(self, plan: AttentionPlan, layer: int, keys_values: torch.Tensor) -> None:
        """Write a layer's keys and values, (T, 2, kv_heads * head_dim), into the step's slots."""
        self._by_token.index_put_((plan.token_rows[layer],), keys_values)

    def attend(self, plan: AttentionPlan, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attention of a layer's queries (T, num_heads, head_dim) to their contexts, same shape.

        The step's own keys and values must be stored before.
        """
        result = torch.empty_like(queries)
        for span in plan.spans:
            keys, values = self._gather(span, layer)
            own = queries[span.start : span.end]
            if span.end - span.start == 1:
                result[span.start] = self._attend_one(own[0], keys, values)
            else:
                result[span.start : span.end] = self._attend_several(own, keys, values, span)
        return result

    def _span(self, batch: StepBatch, row: int, start: int, end: int) -> Span:
        layout = self._layout
        context_tokens = int(batch.context_lens[row])
        num_blocks = -(-context_tokens // layout.block_tokens)
        blocks = torch.from_numpy(batch.block_tables[row, :num_blocks]).long()
        keys = (blocks * layout.num_layers + self._layers[:, None]) * 2
        mask = None
        if 1 < end - start < context_tokens:
            mask = torch.ones((end - start, context_tokens), dtype=torch.bool)
            mask = mask.tril_(context_tokens - (end - start))
        return Span(start, end, context_tokens, torch.cat((keys, keys + 1), dim=1), mask)

    def _gather(self, span: Span, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values of one context, each (kv_heads, context_tokens, head_dim)."""
        layout = self._layout
        rows = span.block_rows[layer]
        gathered = self._gathered[: len(rows)]
        torch.index_select(self._by_block, 0, rows, out=gathered)
        both = gathered.view(2, -1, layout.num_kv_heads, layout.head_dim)
        keys, values = both[:, : span.context_tokens].transpose(1, 2)
        return keys, values

    def _attend_one(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """One token sees its whole context, so the heads of a group are rows of one query."""
        layout = self._layout
        grouped = query.view(1, layout.num_kv_heads, -1, layout.head_dim)
        attended = scaled_dot_product_attention(grouped, keys[None], values[None])
        return attended.reshape(query.shape)

    def _attend_several(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, span: Span
    ) -> torch.Tensor:
        attended = scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=span.mask,
            is_causal=span.mask is None,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)
