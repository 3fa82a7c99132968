"""Bringing a step's plan to the device, and sorting its rows as FlashAttention wants them.

A step of decode rows alone goes into memory that stays where it is, padded up to a bucket: what a
CUDA graph recorded on it once serves every later step of the bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.kernels.decode_buckets import bucket_of
from workers.kernels.flash import PackedRows
from workers.kernels.operators import StepPlan

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StagedPlan:
    """A plan on the device, its phases packed; `is_static`: its memory is the same every time."""

    plan: StepPlan
    prefill: PackedRows | None
    decode: PackedRows | None
    is_static: bool


class PlanStage:
    """Stages one plan after the other; a static one is good until the next of its bucket."""

    def __init__(self, device: torch.device, max_blocks: int) -> None:
        """max_blocks: of one sequence."""
        self._device = device
        self._max_blocks = max_blocks
        self._static: dict[int, _StaticDecode] = {}

    def stage(self, plan: StepPlan, spare_slot: int) -> StagedPlan:
        """`plan` lies on the host, except for `rope`. Padding is written into `spare_slot`."""
        is_decode = not len(plan.prefill_spans) and plan.block_tables.shape[1] <= self._max_blocks
        bucket = bucket_of(len(plan.positions)) if is_decode and len(plan.positions) else None
        if bucket is None:
            return _staged(plan, self._device)
        static = self._static.get(bucket)
        if static is None or static.staged.plan.rope is not plan.rope:
            static = _StaticDecode(bucket, self._max_blocks, plan.rope, self._device)
            self._static[bucket] = static
        static.fill(plan, spare_slot)
        return static.staged


class _StaticDecode:
    """Memory of one bucket: what changes from step to step goes over in two copies."""

    def __init__(
        self, num_rows: int, max_blocks: int, rope: torch.Tensor, device: torch.device
    ) -> None:
        self._num_rows = num_rows
        pinned = device.type == "cuda"
        wide = torch.zeros((2, num_rows), dtype=torch.int64, pin_memory=pinned)
        narrow = torch.zeros((num_rows, 1 + max_blocks), dtype=torch.int32, pin_memory=pinned)
        self._wide, self._narrow = wide, narrow
        self._device_wide, self._device_narrow = wide.to(device), narrow.to(device)
        rows = torch.arange(num_rows, dtype=torch.int32, device=device)
        bounds = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        plan = StepPlan(
            positions=self._device_wide[0],
            slots=self._device_wide[1],
            block_tables=self._device_narrow[:, 1:],
            prefill_spans=torch.empty((0, 3), dtype=torch.int32, device=device),
            decode_rows=torch.stack((rows, rows), dim=1),
            rope=rope,
        )
        packed = PackedRows(
            rows=slice(0, num_rows),
            query_bounds=bounds,
            context_bounds=bounds,  # not read where each span is one row
            context_lens=self._device_narrow[:, 0],
            tables=plan.block_tables,
            max_rows=1,
            max_context=0,
        )
        self.staged = StagedPlan(plan, None, packed, is_static=True)

    def fill(self, plan: StepPlan, spare_slot: int) -> None:
        """Lay a plan of at most `num_rows` rows out; the others see one token of block 0.

        The host's copy is free to change again once the device has read it: a step ends before the
        next one is staged.
        """
        count, width = len(plan.positions), plan.block_tables.shape[1]
        positions, slots = self._wide.numpy()
        positions[:count], slots[:count] = plan.positions.numpy(), plan.slots.numpy()
        positions[count:], slots[count:] = 0, spare_slot
        narrow = self._narrow.numpy()
        narrow[:count, 0] = positions[:count] + 1
        sequences = plan.decode_rows.numpy()[:, 1]
        narrow[:count, 1 : 1 + width] = plan.block_tables.numpy()[sequences]
        narrow[count:, 0], narrow[count:, 1:] = 1, 0
        self._device_wide.copy_(self._wide, non_blocking=True)
        self._device_narrow.copy_(self._narrow, non_blocking=True)


def _staged(plan: StepPlan, device: torch.device) -> StagedPlan:
    """A plan that no graph is made of."""
    spans = plan.prefill_spans.numpy().astype(np.int64)
    rows = plan.decode_rows.numpy().astype(np.int64)
    decode_spans = np.stack((rows[:, 1], rows[:, 0], np.ones(len(rows), np.int64)), axis=1)
    on_device = StepPlan(
        positions=plan.positions.to(device, non_blocking=True),
        slots=plan.slots.to(device, non_blocking=True),
        block_tables=plan.block_tables.to(device, non_blocking=True),
        prefill_spans=plan.prefill_spans,
        decode_rows=plan.decode_rows,
        rope=plan.rope,
    )
    return StagedPlan(
        on_device,
        _packed(plan, spans, device),
        _packed(plan, decode_spans, device),
        is_static=False,
    )


def _packed(plan: StepPlan, spans: IntArray, device: torch.device) -> PackedRows | None:
    """`spans`: (sequence, first row, number of rows) each."""
    if not len(spans):
        return None
    sequences, firsts, counts = spans.T
    lens = plan.positions.numpy()[firsts] + counts

    def to_device(values: IntArray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(device, non_blocking=True)

    return PackedRows(
        rows=_rows(firsts, counts, device),
        query_bounds=to_device(np.concatenate(([0], counts.cumsum()))),
        context_bounds=to_device(np.concatenate(([0], lens.cumsum()))),
        context_lens=to_device(lens),
        tables=to_device(plan.block_tables.numpy()[sequences]),
        max_rows=int(counts.max()),
        max_context=int(lens.max()),
    )


def _rows(firsts: IntArray, counts: IntArray, device: torch.device) -> slice | torch.Tensor:
    """A slice where the spans lie side by side in order, as the scheduler packs them."""
    ends = firsts + counts
    if (firsts[1:] == ends[:-1]).all():
        return slice(int(firsts[0]), int(ends[-1]))
    rows = np.concatenate([np.arange(first, end) for first, end in zip(firsts, ends, strict=True)])
    return torch.from_numpy(rows).to(device, non_blocking=True)
