"""Sorting a step's rows by phase."""

from __future__ import annotations

import numpy as np
import torch

from workers.kernels.operators import StepPlan
from workers.model import StepBatch


def plan_step(batch: StepBatch, rope: torch.Tensor) -> StepPlan:
    """The plan of a step; its tensors share the batch's memory.

    A row is a prefill row if its position lies in its sequence's prompt, and a decode row after
    that, also where a worker recomputes generated tokens in chunks (after a kill or a preemption):
    so a token's KV and logits are the same bytes as when it was first decoded. A chunk over the
    end of the prompt gives both kinds.
    """
    bounds = batch.cu_query_lens.astype(np.int64)
    starts, num_rows = bounds[:-1], np.diff(bounds)
    first_positions = batch.context_lens - num_rows
    prompts = np.fromiter(batch.num_prompt_tokens, dtype=np.int64, count=len(num_rows))
    num_prefill = np.clip(prompts - first_positions, 0, num_rows)
    prefilling = np.flatnonzero(num_prefill)
    spans = np.stack((prefilling, starts[prefilling], num_prefill[prefilling]), axis=1)
    num_decode = num_rows - num_prefill
    sequences = np.repeat(np.arange(len(num_rows)), num_decode)
    firsts = np.repeat(starts + num_prefill, num_decode)
    within = np.arange(len(sequences)) - np.repeat(np.cumsum(num_decode) - num_decode, num_decode)
    decode_rows = np.stack((firsts + within, sequences), axis=1)
    return StepPlan(
        positions=torch.from_numpy(batch.positions),
        slots=torch.from_numpy(batch.slot_mapping),
        block_tables=torch.from_numpy(np.ascontiguousarray(batch.block_tables)),
        prefill_spans=torch.from_numpy(spans.astype(np.int32)),
        decode_rows=torch.from_numpy(decode_rows.astype(np.int32)),
        rope=rope,
    )
