"""The native form: C++ with AVX-512-BF16 (cpp/), bfloat16 weights and KV, float32 sums.

Batch-invariant: a row is summed in one fixed order whatever the batch, and contexts are cut at
fixed positions. So a request gives the same bytes alone, batched, chunked, restored or moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

import numpy as np
import torch

from workers.kernels.native_machine import Kind, Layer, Machine, Norm, Table, Weight, address
from workers.kernels.operators import AttentionShape, StepPlan

_PANEL_COLUMNS = 32
_HALF_PANEL = _PANEL_COLUMNS // 2
_MAX_HEAD_DIM = 256
_BLOCK_MULTIPLE = 16
_RUN_BYTES = 32 << 20
_INT8_INPUTS = 64  # as many inputs of a row share a scale (kSliceInputs of cpp/int8.h)
_INT8_ZERO = 128
_INT8_ROWS_AT_ONCE = 4096


def why_not_native(head_dim: int, block_tokens: int, widths: tuple[int, ...]) -> str | None:
    """The reason why the native form cannot run a model of this shape; None if it can.

    `widths`: the inputs of its matrix products.
    """
    if block_tokens % _BLOCK_MULTIPLE:
        return f"block_tokens {block_tokens} is no multiple of {_BLOCK_MULTIPLE}"
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        return f"head_dim {head_dim} is odd or above {_MAX_HEAD_DIM}"
    odd = [width for width in widths if width % 2]
    return f"a width of {odd[0]} is odd" if odd else None


class NativeOperators:
    """See the port. Uses as many threads as torch is set to.

    With `int8_weights` products are of int8: weights with a scale per output, inputs with one for
    each 64 of a row. Embeddings, norms, KV and attention stay as they are.
    """

    dtype = torch.bfloat16
    batch_invariant = True
    device = torch.device("cpu")
    block_multiple = _BLOCK_MULTIPLE
    num_spare_blocks = 0

    def __init__(self, *, int8_weights: bool = False) -> None:
        """Builds the library where this machine has none yet.

        Raises:
            NativeKernelsMissing: this machine cannot run it; the reason is in the error.
        """
        self.name = "native-3-int8" if int8_weights else "native-2"
        self._machine = Machine()
        self._packer = _Packer(int8_weights=int8_weights)

    def embedding(self, table: torch.Tensor) -> NativeEmbedding:
        """See the port."""
        return NativeEmbedding(self._machine, table.contiguous())

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NativeLinear:
        """See the port."""
        return NativeLinear(self._machine, self._packer, weight, bias)

    def head(self, weight: torch.Tensor) -> NativeLinear:
        """See the port."""
        return self.linear(weight)

    def gated_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> NativeGatedLinear:
        """See the port."""
        return NativeGatedLinear(self._machine, self._packer, weight, bias)

    def rms_norm(self, weight: torch.Tensor, eps: float) -> NativeRmsNorm:
        """See the port."""
        return NativeRmsNorm(self._machine, weight.float().contiguous(), eps)

    def attention(
        self, shape: AttentionShape, keys: torch.Tensor, values: torch.Tensor
    ) -> NativeAttention:
        """See the port.

        Raises:
            ValueError: the blocks have a shape that the kernels do not know.
        """
        _refuse_wrong_blocks(shape, keys, values)
        return NativeAttention(self._machine, shape, keys, values)

    def stage(self, plan: StepPlan) -> StepPlan:
        """See the port."""
        return plan

    def replay(self, memory: Hashable, name: str, plan: StepPlan, body: Callable[[], None]) -> None:
        """See the port. All of the body is one call, during which other Python threads run."""
        self._machine.replay(memory, name, plan, body)


class NativeEmbedding:
    """See the port."""

    def __init__(self, machine: Machine, table: torch.Tensor) -> None:
        self._machine = machine
        self._table = table
        self._width = table.shape[1]
        self._fields = Table(width=self._width, rows=address(table, torch.bfloat16, 1))

    def __call__(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        """See the port."""
        num_rows = len(token_ids)
        source = address(token_ids, torch.int64, num_rows)
        target = address(out, torch.float32, num_rows * self._width)
        self._machine.run(Kind.EMBED, self._fields, num_rows, source, target)


class _Packer:
    """Packs weights into panels of 32 columns, in large runs of memory.

    numpy asks the kernel to map these in huge pages, which makes reading them 8 to 15 % faster than one
    allocation per weight (measured).
    """

    def __init__(self, *, int8_weights: bool) -> None:
        self._int8_weights = int8_weights
        self._free = np.empty(0, dtype=np.uint8)

    def pack(
        self, weight: torch.Tensor, bias: torch.Tensor | None, num_columns: int
    ) -> _PackedWeight:
        """`weight` (rows, inputs), of which the first `num_columns` rows are real.

        Raises:
            ValueError: an odd number of inputs.
        """
        num_inputs = weight.shape[1]
        if num_inputs % 2:
            raise ValueError(f"a native product has an even number of inputs, not {num_inputs}")
        scales = None
        if self._int8_weights:
            whole, scales = _rounded(_padded(weight, _PANEL_COLUMNS))
            panels = whole.view(-1, _PANEL_COLUMNS, whole.shape[1] // 4, 4).permute(0, 2, 1, 3)
        else:
            rows = _padded(weight.to(torch.bfloat16), _PANEL_COLUMNS)
            panels = rows.view(-1, _PANEL_COLUMNS, num_inputs // 2, 2).permute(0, 2, 1, 3)
        padded_bias = None if bias is None else _padded(bias.float(), _PANEL_COLUMNS)
        return _PackedWeight(self._copy_of(panels), padded_bias, scales, num_inputs, num_columns)

    def _copy_of(self, values: torch.Tensor) -> torch.Tensor:
        num_bytes = values.numel() * values.element_size()
        if num_bytes > len(self._free):
            self._free = np.empty(max(num_bytes, _RUN_BYTES), dtype=np.uint8)
        taken, self._free = np.split(self._free, [-(-num_bytes // 64) * 64])
        target = torch.from_numpy(taken)[:num_bytes].view(values.dtype).view(values.shape)
        return target.copy_(values)


class _PackedWeight:
    """A weight in panels of 32 columns.

    bfloat16 [panel][pair of inputs][32][2] or, with scales of all columns, uint8 [panel][four of
    inputs][32][4].
    """

    def __init__(
        self,
        panels: torch.Tensor,
        bias: torch.Tensor | None,
        scales: torch.Tensor | None,
        num_inputs: int,
        num_columns: int,
    ) -> None:
        self._owned = (panels, bias, scales)  # the memory that the fields name
        self.fields = Weight(
            num_inputs=num_inputs,
            num_columns=num_columns,
            panels=panels.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
        )
        self.num_inputs = num_inputs


class NativeLinear:
    """See the port."""

    def __init__(
        self,
        machine: Machine,
        packer: _Packer,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        self._machine = machine
        self._num_columns = weight.shape[0]
        self._weight = packer.pack(weight, bias, self._num_columns)

    def __call__(self, inputs: torch.Tensor, out: torch.Tensor) -> None:
        """See the port."""
        self._multiply(Kind.LINEAR, inputs, out)

    def add_to(self, inputs: torch.Tensor, stream: torch.Tensor) -> None:
        """See the port."""
        self._multiply(Kind.LINEAR_ADD, inputs, stream)

    def _multiply(self, kind: Kind, inputs: torch.Tensor, out: torch.Tensor) -> None:
        num_rows = len(inputs)
        source = address(inputs, torch.bfloat16, num_rows * self._weight.num_inputs)
        target = address(out, torch.float32, num_rows * self._num_columns)
        self._machine.run(kind, self._weight.fields, num_rows, source, target)


class NativeGatedLinear:
    """See the port."""

    def __init__(
        self,
        machine: Machine,
        packer: _Packer,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        self._machine = machine
        self._num_middle = weight.shape[0] // 2
        own_bias = None if bias is None else _interleave(bias)
        self._weight = packer.pack(_interleave(weight), own_bias, 2 * self._num_middle)

    def __call__(self, inputs: torch.Tensor, out: torch.Tensor) -> None:
        """See the port."""
        num_rows = len(inputs)
        source = address(inputs, torch.bfloat16, num_rows * self._weight.num_inputs)
        target = address(out, torch.bfloat16, num_rows * self._num_middle)
        self._machine.run(Kind.GATED_LINEAR, self._weight.fields, num_rows, source, target)


class NativeRmsNorm:
    """See the port."""

    def __init__(self, machine: Machine, weight: torch.Tensor, eps: float) -> None:
        self._machine = machine
        self._weight = weight
        self._width = len(weight)
        self._fields = Norm(width=self._width, weight=weight.data_ptr(), epsilon=eps)

    def __call__(self, stream: torch.Tensor, out: torch.Tensor) -> None:
        """See the port."""
        num_rows, num_elements = len(stream), len(stream) * self._width
        source = address(stream, torch.float32, num_elements)
        target = address(out, torch.bfloat16, num_elements)
        self._machine.run(Kind.RMS_NORM, self._fields, num_rows, source, target)


class NativeAttention:
    """See the port."""

    def __init__(
        self, machine: Machine, shape: AttentionShape, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        self._machine = machine
        self._owned = (shape, keys, values)  # the memory that the fields name
        self._query_width = shape.num_heads * shape.head_dim
        self._qkv_width = self._query_width + 2 * shape.num_kv_heads * shape.head_dim
        self._fields = Layer(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_tokens=keys.shape[1],
            block_stride=keys.stride(0),
            token_stride=keys.stride(1),
            window=shape.window,
            num_rotated=shape.num_rotated,
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            query_norm=None if shape.query_norm is None else shape.query_norm.data_ptr(),
            key_norm=None if shape.key_norm is None else shape.key_norm.data_ptr(),
            norm_epsilon=shape.norm_eps,
            scale=shape.scale * math.log2(math.e),
        )

    def rotate_and_store(self, plan: StepPlan, qkv: torch.Tensor, queries: torch.Tensor) -> None:
        """See the port."""
        num_rows = len(plan.positions)
        source = address(qkv, torch.float32, num_rows * self._qkv_width)
        target = address(queries, torch.bfloat16, num_rows * self._query_width)
        self._machine.run_step(Kind.ROTATE_AND_STORE, self._fields, plan, source, target)

    def attend_prefill(self, plan: StepPlan, queries: torch.Tensor, out: torch.Tensor) -> None:
        """See the port."""
        self._attend(Kind.ATTEND_PREFILL, plan, queries, out)

    def attend_decode(self, plan: StepPlan, queries: torch.Tensor, out: torch.Tensor) -> None:
        """See the port."""
        self._attend(Kind.ATTEND_DECODE, plan, queries, out)

    def _attend(self, kind: Kind, plan: StepPlan, queries: torch.Tensor, out: torch.Tensor) -> None:
        num_elements = len(plan.positions) * self._query_width
        source = address(queries, torch.bfloat16, num_elements)
        target = address(out, torch.bfloat16, num_elements)
        self._machine.run_step(kind, self._fields, plan, source, target)


def _interleave(rows: torch.Tensor) -> torch.Tensor:
    """Rows of gates and ups as the panels hold them: 16 gates, their 16 ups, and so on."""
    gates, ups = (_padded(half, _HALF_PANEL) for half in rows.chunk(2))
    shape = (-1, _HALF_PANEL, *rows.shape[1:])
    return torch.stack((gates.view(shape), ups.view(shape)), dim=1).flatten(0, 2)


def _rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as whole numbers plus 128, their inputs filled up to whole groups; float32 scales."""
    num_rows, num_inputs = rows.shape
    width = -(-num_inputs // _INT8_INPUTS) * _INT8_INPUTS
    whole = torch.full((num_rows, width), _INT8_ZERO, dtype=torch.uint8)
    scales = torch.empty(num_rows)
    for start in range(0, num_rows, _INT8_ROWS_AT_ONCE):
        span = slice(start, start + _INT8_ROWS_AT_ONCE)
        values = rows[span].float()
        scales[span] = values.abs().amax(dim=1) / 127
        parts = values / scales[span, None].clamp(min=torch.finfo(torch.float32).tiny)
        whole[span, :num_inputs] = (parts.round() + _INT8_ZERO).to(torch.uint8)
    return whole, scales


def _padded(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    """`rows` with rows of zeros up to a multiple."""
    missing = -len(rows) % multiple
    if not missing:
        return rows.contiguous()
    return torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:]))))


def _refuse_wrong_blocks(shape: AttentionShape, keys: torch.Tensor, values: torch.Tensor) -> None:
    reason = why_not_native(shape.head_dim, keys.shape[1], ())
    if reason is not None:
        raise ValueError(reason)
    width = shape.num_kv_heads * shape.head_dim
    for pool in (keys, values):
        if pool.dtype != torch.bfloat16 or pool.stride()[1:] != (width, shape.head_dim, 1):
            raise ValueError(f"blocks are {pool.dtype} with strides {pool.stride()}")
    if keys.stride() != values.stride():
        raise ValueError("keys and values lie in different order")
    for norm in (shape.query_norm, shape.key_norm):
        if norm is not None and norm.dtype != torch.float32:
            raise ValueError(f"norms are float32, not {norm.dtype}")
