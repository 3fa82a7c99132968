"""The reference form: plain torch, any float type, any device. Slow where it gathers contexts."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch.nn import functional

from workers.kernels.onednn import PackedWeight
from workers.kernels.operators import AttentionShape, StepPlan


class ReferenceOperators:
    """See the port."""

    batch_invariant = False
    device = torch.device("cpu")
    block_multiple = 1
    num_spare_blocks = 0

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.name = "reference-1"
        self._contexts = _Contexts()

    def embedding(self, table: torch.Tensor) -> ReferenceEmbedding:
        """See the port."""
        return ReferenceEmbedding(table)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> ReferenceLinear:
        """See the port."""
        return ReferenceLinear(PackedWeight(weight, bias))

    def head(self, weight: torch.Tensor) -> ReferenceLinear:
        """See the port."""
        return self.linear(weight.float())

    def gated_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> ReferenceGatedLinear:
        """See the port."""
        return ReferenceGatedLinear(PackedWeight(weight, bias))

    def rms_norm(self, weight: torch.Tensor, eps: float) -> ReferenceRmsNorm:
        """See the port."""
        return ReferenceRmsNorm(weight, eps)

    def attention(
        self, shape: AttentionShape, keys: torch.Tensor, values: torch.Tensor
    ) -> ReferenceAttention:
        """See the port."""
        return ReferenceAttention(shape, keys, values, self._contexts)

    def stage(self, plan: StepPlan) -> StepPlan:
        """See the port."""
        return plan

    def replay(self, memory: Hashable, name: str, plan: StepPlan, body: Callable[[], None]) -> None:
        """See the port. Records nothing."""
        body()


@dataclass(frozen=True, slots=True)
class ReferenceEmbedding:
    """See the port."""

    table: torch.Tensor

    def __call__(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """See the port."""
        out.copy_(functional.embedding(token_ids, self.table))


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    """See the port."""

    weight: PackedWeight

    def __call__(self, inputs: torch.Tensor, out: torch.Tensor) -> None:
        """See the port."""
        out.copy_(self.weight.products(inputs).view(out.shape))

    def add_to(self, inputs: torch.Tensor, stream: torch.Tensor) -> None:
        """See the port."""
        stream += self.weight.products(inputs)


@dataclass(frozen=True, slots=True)
class ReferenceGatedLinear:
    """See the port."""

    weight: PackedWeight

    def __call__(self, inputs: torch.Tensor, out: torch.Tensor) -> None:
        """See the port."""
        gate, up = self.weight.products(inputs).chunk(2, dim=1)
        torch.mul(functional.silu(gate), up, out=out)


@dataclass(frozen=True, slots=True)
class ReferenceRmsNorm:
    """See the port."""

    weight: torch.Tensor
    eps: float

    def __call__(self, stream: torch.Tensor, out: torch.Tensor) -> None:
        """See the port."""
        out.copy_(functional.rms_norm(stream, self.weight.shape, self.weight, self.eps))


@dataclass(frozen=True, slots=True)
class _Context:
    """What rows [start, end) of a step see: `num_tokens` tokens in `blocks`, int64 (n).

    `mask`: bool (end - start, num_tokens), or None where all is seen (one row) or causally (more).
    """

    start: int
    end: int
    num_tokens: int
    blocks: torch.Tensor
    mask: torch.Tensor | None


class _Contexts:
    """Contexts of a step, made once for all layers."""

    def __init__(self) -> None:
        self._plan: StepPlan | None = None
        self._made: dict[tuple[str, int, int], list[_Context]] = {}

    def of(self, plan: StepPlan, phase: str, block_tokens: int, window: int) -> list[_Context]:
        """The contexts of one phase, "prefill" or "decode"."""
        if plan is not self._plan:
            self._plan = plan
            self._made.clear()
        key = (phase, block_tokens, window)
        if key not in self._made:
            if phase == "prefill":
                spans = [tuple(span) for span in plan.prefill_spans.tolist()]
            else:
                spans = [(sequence, row, 1) for row, sequence in plan.decode_rows.tolist()]
            self._made[key] = [_context(plan, span, block_tokens, window) for span in spans]
        return self._made[key]


def _context(
    plan: StepPlan, span: tuple[int, int, int], block_tokens: int, window: int
) -> _Context:
    sequence, start, num_rows = span
    position = int(plan.positions[start])
    num_tokens = position + num_rows
    blocks = plan.block_tables[sequence, : -(-num_tokens // block_tokens)].long()
    mask = None
    is_cut = 0 < window < num_tokens
    if is_cut or (num_rows > 1 and position):
        places = torch.arange(num_tokens, device=blocks.device)
        rows = torch.arange(position, num_tokens, device=blocks.device)[:, None]
        mask = places <= rows
        if is_cut:
            mask &= places > rows - window
    return _Context(start, start + num_rows, num_tokens, blocks, mask)


class ReferenceAttention:
    """See the port."""

    def __init__(
        self,
        shape: AttentionShape,
        keys: torch.Tensor,
        values: torch.Tensor,
        contexts: _Contexts,
    ) -> None:
        self._shape = shape
        self._keys = keys
        self._values = values
        self._contexts = contexts

    def rotate_and_store(self, plan: StepPlan, qkv: torch.Tensor, queries: torch.Tensor) -> None:
        """See the port."""
        rotate_and_store(self._shape, self._keys, self._values, plan, qkv, queries)

    def attend_prefill(self, plan: StepPlan, queries: torch.Tensor, out: torch.Tensor) -> None:
        """See the port."""
        for context in self._contexts.of(plan, "prefill", self._keys.shape[1], self._shape.window):
            attended = functional.scaled_dot_product_attention(
                queries[context.start : context.end].transpose(0, 1)[None],
                self._gather(self._keys, context),
                self._gather(self._values, context),
                attn_mask=context.mask,
                is_causal=context.mask is None and context.end - context.start > 1,
                scale=self._shape.scale,
                enable_gqa=True,
            )
            out[context.start : context.end] = attended[0].transpose(0, 1)

    def attend_decode(self, plan: StepPlan, queries: torch.Tensor, out: torch.Tensor) -> None:
        """See the port. A row sees its whole context: the heads of a group are rows of one query."""
        shape = self._shape
        grouped = queries.view(len(queries), shape.num_kv_heads, -1, shape.head_dim)
        for context in self._contexts.of(plan, "decode", self._keys.shape[1], shape.window):
            attended = functional.scaled_dot_product_attention(
                grouped[context.start : context.end],
                self._gather(self._keys, context),
                self._gather(self._values, context),
                attn_mask=context.mask,
                scale=shape.scale,
            )
            out[context.start] = attended.view(shape.num_heads, shape.head_dim)

    def _gather(self, pool: torch.Tensor, context: _Context) -> torch.Tensor:
        """Keys or values of a context, (1, kv_heads, num_tokens, head_dim)."""
        gathered = pool.index_select(0, context.blocks).flatten(0, 1)[: context.num_tokens]
        return gathered.transpose(0, 1)[None]


def rotate_and_store(
    shape: AttentionShape,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: StepPlan,
    qkv: torch.Tensor,
    queries: torch.Tensor,
) -> None:
    """`PagedAttention.rotate_and_store` of a layer with blocks `keys` and `values`."""
    block_tokens = keys.shape[1]
    heads = qkv.view(len(qkv), -1, shape.head_dim)
    sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    own, new_keys, new_values = torch.split(heads, sizes, dim=1)
    if shape.query_norm is not None and shape.key_norm is not None:
        width = (shape.head_dim,)
        own.copy_(functional.rms_norm(own, width, shape.query_norm, shape.norm_eps))
        new_keys.copy_(functional.rms_norm(new_keys, width, shape.key_norm, shape.norm_eps))
    if shape.num_rotated:
        _rotate(heads[:, : sizes[0] + sizes[1], : shape.num_rotated], plan)
    queries.copy_(own)
    blocks, offsets = plan.slots // block_tokens, plan.slots % block_tokens
    keys[blocks, offsets] = new_keys.to(keys.dtype)
    values[blocks, offsets] = new_values.to(values.dtype)


def _rotate(heads: torch.Tensor, plan: StepPlan) -> None:
    """Rotate `heads` (T, heads, num_rotated) in place."""
    angles = plan.rope[plan.positions][:, None]
    cosines, sines = angles.chunk(2, dim=2)
    first, second = heads.chunk(2, dim=2)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=2)
    heads.copy_(turned)
