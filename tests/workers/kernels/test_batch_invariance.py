"""The native form gives the same bytes for a row, whatever shares its step or cuts its prompt."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workers.kernels.paged_case import Case, Lane, PagedRun, PagedStep, cases
from workers.kernels.native import NativeOperators
from workers.kernels.operators import AttentionShape

RANDOM_SHAPES = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize=True,
)


def run_in_pieces(step: PagedStep, native: NativeOperators, seed: int) -> list[torch.Tensor]:
    """Each lane's results, computed in chunks of random sizes beside random other chunks."""
    chooser = np.random.default_rng(seed)
    run = PagedRun(step, native)
    done = [0] * len(step.case.lanes)
    results: list[list[torch.Tensor]] = [[] for _ in step.case.lanes]
    while True:
        ends = [lane.start + lane.count for lane in step.case.lanes]
        going = [number for number, end in enumerate(ends) if done[number] < end]
        if not going:
            return [torch.cat(parts) for parts in results]
        chosen = chooser.permutation(going)[: chooser.integers(1, len(going) + 1)].tolist()
        sizes = chooser.choice([1, 2, 17, 64, 300], len(chosen)).tolist()
        spans = [
            (number, done[number], min(size, ends[number] - done[number]))
            for number, size in zip(chosen, sizes, strict=True)
        ]
        rows = torch.split(run.run(spans), [count for *_, count in spans])
        for (number, _, count), part in zip(spans, rows, strict=True):
            results[number].append(part)
            done[number] += count


@given(case=cases(), seed=st.integers(0, 1000), threads=st.sampled_from([1, 2]))
@RANDOM_SHAPES
def test_attention_of_a_row_does_not_depend_on_batch_chunks_or_threads(
    case: Case, seed: int, threads: int, native: NativeOperators
) -> None:
    step = PagedStep(case)
    whole = [
        PagedRun(step, native).run([(number, 0, lane.start + lane.count)])
        for number, lane in enumerate(case.lanes)
    ]

    torch.set_num_threads(threads)
    try:
        pieces = run_in_pieces(step, native, seed)
    finally:
        torch.set_num_threads(1)

    for one, other in zip(whole, pieces, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_short_chunks_late_in_a_prompt_have_the_bytes_of_the_whole_one(
    threads: int, window: int, native: NativeOperators
) -> None:
    shape = AttentionShape(
        num_heads=6, num_kv_heads=2, head_dim=80, scale=80**-0.5, num_rotated=80, window=window
    )
    total, sizes = 1300, [1, 4, 7, 33, 64, 65, 100]  # of both forms of the kernel
    step = PagedStep(Case(shape, 48, (Lane(0, total, total),), seed=3))
    whole = PagedRun(step, native).run([(0, 0, total)])
    run = PagedRun(step, native)
    done = total - sum(sizes)
    run.run([(0, 0, done)])

    torch.set_num_threads(threads)
    try:
        for size in sizes:
            assert torch.equal(run.run([(0, done, size)]), whole[done : done + size])
            done += size
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("num_inputs", [48, 576, 1536])
def test_products_of_a_row_do_not_depend_on_the_other_rows(
    num_inputs: int, native: NativeOperators
) -> None:
    torch.manual_seed(num_inputs)
    inputs = torch.randn(70, num_inputs).bfloat16()
    linear = native.linear(torch.randn(100, num_inputs).bfloat16())
    gated = native.gated_linear(torch.randn(100, num_inputs).bfloat16())
    whole, whole_gated = torch.empty(70, 100), torch.empty(70, 50, dtype=torch.bfloat16)
    linear(inputs, whole)
    gated(inputs, whole_gated)

    for first, end in [(0, 1), (3, 5), (0, 12), (7, 20), (1, 70)]:
        part = torch.empty(end - first, 100)
        part_gated = torch.empty(end - first, 50, dtype=torch.bfloat16)
        linear(inputs[first:end], part)
        gated(inputs[first:end], part_gated)
        assert torch.equal(part, whole[first:end])
        assert torch.equal(part_gated, whole_gated[first:end])
