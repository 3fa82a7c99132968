"""The operator port: what a decoder asks of the machine it runs on.

A form (`reference`, `native`) makes operators bound to weights and to a layer's blocks; all forms
pass tests/workers/kernels. Weights, keys, values and what feeds a matrix product are in the form's
`dtype`; the residual stream, norms, rotations, sums and logits are float32 whatever that is.

Operators write into tensors that their caller owns, contiguous and of the stated shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One packed step of T tokens over B sequences, the same for all layers.

    positions, slots: int64 [T]; slot = block id * block_tokens + offset.
    block_tables: int32 [B, max_blocks].
    prefill_spans: int32 [P, 3], each (sequence, first row, number of rows): prompt tokens.
    decode_rows: int32 [R, 2], each (row, sequence): tokens after the prompt.
    rope: float32 [positions, rotated elements], cosines then sines of each position; it reaches at
    least to the step's last position.

    Every row stands in one span or is one decode row. Which, its position alone decides, never
    how many tokens of its sequence the step holds: the two are summed in different order.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    prefill_spans: torch.Tensor
    decode_rows: torch.Tensor
    rope: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention.

    `num_rotated`: leading elements of a head that are rotated, 0 for none. `window`: how many
    tokens a token sees, itself included, 0 for all. `query_norm`, `key_norm`: float32 (head_dim).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    num_rotated: int
    window: int = 0
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    norm_eps: float = 1e-6


class Embedding(Protocol):
    """Rows of a table."""

    def __call__(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """`token_ids` int64 (T), each below the table's length; `out` float32 (T, width)."""
        ...


class Linear(Protocol):
    """A weight and a bias or none. Residual sums are taken here, where the products are at hand."""

    def __call__(self, inputs: torch.Tensor, out: torch.Tensor) -> None:
        """Products of `inputs`, dtype (T, in), into `out`, float32 (T, out)."""
        ...

    def add_to(self, inputs: torch.Tensor, stream: torch.Tensor) -> None:
        """As a call, but added to `stream`, float32 (T, out)."""
        ...


class GatedLinear(Protocol):
    """Two products of the same inputs: silu(gate) * up."""

    def __call__(self, inputs: torch.Tensor, out: torch.Tensor) -> None:
        """`inputs` dtype (T, in), `out` dtype (T, middle)."""
        ...


class RmsNorm(Protocol):
    """Rows divided by their root mean square, times a weight."""

    def __call__(self, stream: torch.Tensor, out: torch.Tensor) -> None:
        """`stream` float32 (T, width), `out` dtype (T, width)."""
        ...


class PagedAttention(Protocol):
    """A layer's attention over its blocks. The three calls of a step come in this order."""

    def rotate_and_store(self, plan: StepPlan, qkv: torch.Tensor, queries: torch.Tensor) -> None:
        """Norm and rotate heads, store keys and values into the plan's slots.

        `qkv` float32 (T, heads + 2 * kv_heads, head_dim): all query heads, all key heads, all
        value heads; may be overwritten. `queries` dtype (T, heads, head_dim) is written.
        """
        ...

    def attend_prefill(self, plan: StepPlan, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Causal attention of the prefill spans; `queries` and `out` (T, heads, head_dim)."""
        ...

    def attend_decode(self, plan: StepPlan, queries: torch.Tensor, out: torch.Tensor) -> None:
        """The same of the decode rows. Other rows of `out` are left alone."""
        ...


class Operators(Protocol):
    """One form.

    `name` changes with anything that changes a bit of a result. `batch_invariant`: a row's result
    is the same bytes whatever rows share the step, however its prompt is cut into chunks.
    `device`: where all tensors lie. `block_multiple`: blocks hold a multiple of so many tokens.
    `num_spare_blocks`: as many of the pool's last blocks belong to the form.
    """

    @property
    def name(self) -> str: ...  # noqa: D102  # the class says it
    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102
    @property
    def batch_invariant(self) -> bool: ...  # noqa: D102
    @property
    def device(self) -> torch.device: ...  # noqa: D102
    @property
    def block_multiple(self) -> int: ...  # noqa: D102
    @property
    def num_spare_blocks(self) -> int: ...  # noqa: D102

    def embedding(self, table: torch.Tensor) -> Embedding:
        """`table` dtype (length, width)."""
        ...

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """`weight` dtype (out, in), packed here; `bias` (out)."""
        ...

    def head(self, weight: torch.Tensor) -> Linear:
        """`weight` dtype (vocab, in). Logits are not rounded to dtype: ties would decide tokens."""
        ...

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> GatedLinear:
        """`weight` dtype (2 * middle, in): all gates, then all ups; `bias` (2 * middle)."""
        ...

    def rms_norm(self, weight: torch.Tensor, eps: float) -> RmsNorm:
        """`weight` float32 (width)."""
        ...

    def attention(
        self, shape: AttentionShape, keys: torch.Tensor, values: torch.Tensor
    ) -> PagedAttention:
        """`keys`, `values`: dtype (num_blocks, block_tokens, kv_heads, head_dim), views of the pool.

        Blocks may lie apart; within a block all is contiguous.
        """
        ...

    def stage(self, plan: StepPlan) -> StepPlan:
        """The plan as this form's operators read it; good until the next one is staged.

        `plan` lies on the host, except for `rope`. What comes back may have more rows: the buffers
        of the step then have as many, and what the added rows hold does not matter.
        """
        ...

    def replay(self, memory: Hashable, name: str, plan: StepPlan, body: Callable[[], None]) -> None:
        """Do what `body` does: a run of operators, each on all rows of `plan`.

        A form may record the body when it first meets `name` and repeat that for later plans, as a
        CUDA graph does. So the same name means the same operators while `memory` is the same; only
        the plan and the number of rows change. With another memory all names are new.
        """
        ...
