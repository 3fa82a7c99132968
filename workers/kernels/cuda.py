"""The CUDA form: bfloat16 weights and KV, FlashAttention over the block pool, graphs for decode.

Products come from cuBLAS with float32 sums that are not rounded on the way into the residual
stream or the logits. Not batch-invariant: cuBLAS chooses its order of sums by the batch's size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

import torch

from workers.kernels.cuda_graphs import StepRecorder
from workers.kernels.cuda_plans import PlanStage, StagedPlan
from workers.kernels.flash import FlashAttention, LayerBlocks, PackedRows, why_not_flash
from workers.kernels.onednn import PackedWeight
from workers.kernels.operators import AttentionShape, StepPlan
from workers.kernels.reference import (
    ReferenceEmbedding,
    ReferenceGatedLinear,
    ReferenceRmsNorm,
    rotate_and_store,
)


class CudaOperators:
    """See the port. `recorder` decides what is recorded; it and `device` may be stand-ins."""

    dtype = torch.bfloat16
    batch_invariant = False
    num_spare_blocks = 1  # padding rows write there

    def __init__(
        self, flash: FlashAttention, device: torch.device, recorder: StepRecorder, max_blocks: int
    ) -> None:
        """max_blocks: of one sequence."""
        self.name = f"cuda-{flash.name}-1"
        self.device = device
        self.block_multiple = flash.block_multiple
        self._flash = flash
        self._recorder = recorder
        self._stage = PlanStage(device, max_blocks)
        self._staged: StagedPlan | None = None
        self._spare_slot = 0

    def embedding(self, table: torch.Tensor) -> ReferenceEmbedding:
        """See the port."""
        return ReferenceEmbedding(table.to(self.device))

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> CudaLinear:
        """See the port."""
        return CudaLinear(weight.to(self.device), None if bias is None else bias.to(self.device))

    def head(self, weight: torch.Tensor) -> CudaLinear:
        """See the port."""
        return self.linear(weight)

    def gated_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> ReferenceGatedLinear:
        """See the port."""
        own_bias = None if bias is None else bias.to(self.device)
        return ReferenceGatedLinear(PackedWeight(weight.to(self.device), own_bias))

    def rms_norm(self, weight: torch.Tensor, eps: float) -> ReferenceRmsNorm:
        """See the port."""
        return ReferenceRmsNorm(weight.to(self.device), eps)

    def attention(
        self, shape: AttentionShape, keys: torch.Tensor, values: torch.Tensor
    ) -> CudaAttention:
        """See the port.

        Raises:
            ValueError: this version of FlashAttention does not know such blocks.
        """
        reason = why_not_flash(self._flash, shape.head_dim, keys.shape[1])
        if reason is not None:
            raise ValueError(reason)
        if keys.stride(3) != 1 or values.stride(3) != 1:
            raise ValueError(f"the elements of a head lie apart: {keys.stride()}")
        self._spare_slot = (len(keys) - 1) * keys.shape[1]
        return CudaAttention(self, _moved(shape, self.device), keys, values)

    def stage(self, plan: StepPlan) -> StepPlan:
        """See the port. A step of decode rows alone comes back padded to its bucket."""
        self._staged = self._stage.stage(plan, self._spare_slot)
        return self._staged.plan

    def replay(self, memory: Hashable, name: str, plan: StepPlan, body: Callable[[], None]) -> None:
        """See the port. Records steps of decode rows, one graph for each bucket."""
        if self.staged(plan).is_static:
            self._recorder.replay(memory, name, plan, body)
        else:
            body()

    def staged(self, plan: StepPlan) -> StagedPlan:
        """What belongs to the plan that `stage` gave last.

        Raises:
            ValueError: it is another one.
        """
        if self._staged is None or self._staged.plan is not plan:
            raise ValueError("the plan was not the last to be staged")
        return self._staged

    def attend(
        self, packed: PackedRows, blocks: LayerBlocks, queries: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attention of one phase's rows; the others of `out` are left alone."""
        attend = self._flash.decode if packed.max_rows == 1 else self._flash.prefill
        out[packed.rows] = attend(queries[packed.rows], packed, blocks)


class CudaLinear:
    """See the port."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight.t()
        self._bias = None if bias is None else bias.float()

    def __call__(self, inputs: torch.Tensor, out: torch.Tensor) -> None:
        """See the port."""
        products = out.view(len(inputs), self._weight.shape[1])
        if inputs.is_cuda:
            torch.mm(inputs, self._weight, out_dtype=torch.float32, out=products)
        else:
            torch.mm(inputs.float(), self._weight.float(), out=products)
        if self._bias is not None:
            products += self._bias

    def add_to(self, inputs: torch.Tensor, stream: torch.Tensor) -> None:
        """See the port."""
        if inputs.is_cuda:
            stream += torch.mm(inputs, self._weight, out_dtype=torch.float32)
        else:
            stream.addmm_(inputs.float(), self._weight.float())
        if self._bias is not None:
            stream += self._bias


class CudaAttention:
    """See the port."""

    def __init__(
        self,
        operators: CudaOperators,
        shape: AttentionShape,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        self._operators = operators
        self._shape = shape
        self._blocks = LayerBlocks(keys, values, shape.scale, shape.window)

    def rotate_and_store(self, plan: StepPlan, qkv: torch.Tensor, queries: torch.Tensor) -> None:
        """See the port."""
        rotate_and_store(self._shape, self._blocks.keys, self._blocks.values, plan, qkv, queries)

    def attend_prefill(self, plan: StepPlan, queries: torch.Tensor, out: torch.Tensor) -> None:
        """See the port."""
        packed = self._operators.staged(plan).prefill
        if packed is not None:
            self._operators.attend(packed, self._blocks, queries, out)

    def attend_decode(self, plan: StepPlan, queries: torch.Tensor, out: torch.Tensor) -> None:
        """See the port."""
        packed = self._operators.staged(plan).decode
        if packed is not None:
            self._operators.attend(packed, self._blocks, queries, out)


def _moved(shape: AttentionShape, device: torch.device) -> AttentionShape:
    if shape.query_norm is None or shape.key_norm is None:
        return shape
    return replace(
        shape, query_norm=shape.query_norm.to(device), key_norm=shape.key_norm.to(device)
    )
