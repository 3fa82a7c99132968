"""Once a step of its size has run, a step asks for no more memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from tests.workers.models.tiny_models import TINY_NAMES
from workers.models.bench import EngineBench
from workers.models.load import load_runner
from workers.models.torch_runner import TorchRunner

PROMPT = [5, 77, 130, 9, 250, 31, 8] * 8
MakeModel = Callable[[str], Path]


@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", TINY_NAMES)
def test_neither_a_chunk_nor_decode_rows_allocate_a_tensor(
    name: str, dtype: str, tiny_model: MakeModel
) -> None:
    runner = load_runner("torch", tiny_model(name), dtype=dtype)
    if not isinstance(runner, TorchRunner) or not runner.operators.batch_invariant:
        pytest.skip("this machine has no native operators")
    bench = EngineBench(runner)
    lanes = [bench.lane(PROMPT) for _ in range(5)]
    for lane in lanes:
        lane.num_prompt_tokens = 20
    bench.step(lanes, [20] * 5)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        bench.step(lanes[:3], [1] * 3)
        bench.step(lanes, [1, 1, 1, 7, 20])

    assert len(seen.events()) > 0
    asked = [(each.name, each.self_cpu_memory_usage) for each in seen.events()]
    assert [each for each in asked if each[1] > 0] == []
