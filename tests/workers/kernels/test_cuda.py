"""What the CUDA form passes to flash-attn, against its recorded signatures."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.workers.kernels.flash_stand_in import FLASH_2, FLASH_3, StandIn
from tests.workers.kernels.paged_case import Case, Lane, PagedRun, PagedStep
from workers.kernels.cuda import CudaOperators
from workers.kernels.cuda_graphs import Eager
from workers.kernels.flash import Flash2, Flash3, find_flash
from workers.kernels.operators import AttentionShape

CPU = torch.device("cpu")
SHAPE = AttentionShape(6, 2, 64, 64**-0.5, num_rotated=64, window=300)
PREFILL, DECODE = Lane(0, 40, 40), Lane(300, 1, 9)


def run(flash: Flash2 | Flash3, *lanes: Lane) -> PagedRun:
    """A step of the lanes on blocks of 256 tokens."""
    step = PagedStep(Case(SHAPE, 256, lanes, seed=3))
    own = PagedRun(step, CudaOperators(flash, CPU, Eager(), max_blocks=4))
    own.run_case()
    return own


def given(stand_in: StandIn) -> dict[str, Any]:
    """The arguments of the last call."""
    return stand_in.calls[-1][1]


def test_version_2_takes_prompts_packed_and_decode_rows_with_their_caches() -> None:
    stand_in = StandIn(FLASH_2)
    own = run(Flash2(stand_in.module), PREFILL, replace(PREFILL, count=7), DECODE)

    (prefill, packed), (decode, cached) = stand_in.calls[-2:]

    assert (prefill, decode) == ("flash_attn_varlen_func", "flash_attn_with_kvcache")
    assert packed["cu_seqlens_q"].tolist() == [0, 40, 47]
    assert (packed["max_seqlen_q"], packed["max_seqlen_k"]) == (40, 40)
    assert packed["window_size"] == cached["window_size"] == (299, 0)
    assert cached["cache_seqlens"].tolist() == [301]
    assert cached["block_table"].tolist() == [own.step.tables[2]]


def test_version_3_takes_both_with_their_caches() -> None:
    stand_in = StandIn(FLASH_3)
    run(Flash3(stand_in.module), PREFILL, DECODE)

    (prefill, packed), (decode, cached) = stand_in.calls[-2:]

    assert prefill == decode == "flash_attn_with_kvcache"
    assert packed["cu_seqlens_q"].tolist() == [0, 40]
    assert packed["page_table"].shape[0] == cached["page_table"].shape[0] == 1


def test_the_pool_goes_in_as_it_lies() -> None:
    stand_in = StandIn(FLASH_2)
    own = run(Flash2(stand_in.module), PREFILL)

    keys, values = given(stand_in)["k"], given(stand_in)["v"]

    assert keys.data_ptr() == own.whole_pool[:, 1, 0].data_ptr()
    assert values.data_ptr() == own.whole_pool[:, 1, 1].data_ptr()
    assert keys.stride() == own.whole_pool[:, 1, 0].stride()
    assert keys.stride(0) == 4 * keys.shape[1] * keys.stride(1)


def test_decode_steps_of_one_bucket_use_the_same_memory() -> None:
    stand_in = StandIn(FLASH_2)
    lanes = [replace(DECODE, start=300 - number) for number in range(7)]
    own = run(Flash2(stand_in.module), *lanes)
    first = given(stand_in)
    own.run([(number, lane.start - 1, 1) for number, lane in enumerate(lanes[:5])])
    second = given(stand_in)

    assert len(first["q"]) == len(second["q"]) == 8
    for name in ("cache_seqlens", "block_table"):
        assert first[name].data_ptr() == second[name].data_ptr()
    lens = [lane.start for lane in lanes[:5]]
    assert second["cache_seqlens"].tolist() == [*lens, 1, 1, 1]


def test_blocks_of_16_tokens_are_refused_where_the_library_refuses_them() -> None:
    keys = torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16)

    with pytest.raises(ValueError, match="multiple of 256 tokens, and block_tokens is 16"):
        CudaOperators(Flash2(StandIn(FLASH_2).module), CPU, Eager(), 4).attention(SHAPE, keys, keys)
    CudaOperators(Flash3(StandIn(FLASH_3).module), CPU, Eager(), 4).attention(SHAPE, keys, keys)


def test_heads_that_the_library_does_not_know_are_refused() -> None:
    keys = torch.zeros(4, 256, 2, 320, dtype=torch.bfloat16)
    shape = replace(SHAPE, head_dim=320, num_rotated=0)

    with pytest.raises(ValueError, match="head_dim is 320"):
        CudaOperators(Flash2(StandIn(FLASH_2).module), CPU, Eager(), 4).attention(shape, keys, keys)


def test_a_plan_that_was_not_staged_is_refused() -> None:
    own = run(Flash2(StandIn(FLASH_2).module), PREFILL)
    plan = own.step.plan([(0, 0, 40)], CPU)
    queries = torch.empty(40, 6, 64, dtype=torch.bfloat16)

    with pytest.raises(ValueError, match="staged"):
        own.attention.attend_prefill(plan, queries, queries)


def test_the_newest_library_that_can_be_imported_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert find_flash() is None

    monkeypatch.setitem(sys.modules, "flash_attn", StandIn(FLASH_2).module)
    assert isinstance(find_flash(), Flash2)

    monkeypatch.setitem(sys.modules, "flash_attn_interface", StandIn(FLASH_3).module)
    assert isinstance(find_flash(), Flash3)
