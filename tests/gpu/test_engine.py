"""The CUDA engine against Hugging Face, and its graphs against running the same eagerly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.gpu.machine import DEVICE, IS_REHEARSAL, engine_on
from tests.workers.models.tiny_models import TINY_NAMES
from workers.kernels.cuda_graphs import Eager, StepRecorder
from workers.model import Float32Array
from workers.models.bench import EngineBench

pytestmark = pytest.mark.gpu

PROMPT = np.random.default_rng(9).integers(3, 300, 300).tolist()
NUM_TOKENS = 12
MakeModel = Callable[[str], Path]


@pytest.mark.parametrize("name", TINY_NAMES)
def test_logits_stay_near_those_of_hugging_face_in_float32(
    name: str, tiny_model: MakeModel
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0].numpy()
    bench = EngineBench(engine_on(tiny_model(name)), num_blocks=8)
    lane = bench.lane(PROMPT)
    lane.num_prompt_tokens = 290

    for count in (200, 90, *[1] * 10):
        logits = bench.step([lane], [count])
        difference = np.abs(logits[0] - expected[lane.num_computed - 1])
        assert difference.mean() < 0.05 * np.abs(expected).max()


def test_the_devices_memory_is_told_so_that_the_pool_can_be_sized(tiny_model: MakeModel) -> None:
    memory = engine_on(tiny_model("qwen3")).spec.memory

    if IS_REHEARSAL:
        assert memory is None
        return
    assert memory is not None
    assert 0 < memory.own < memory.total
    pool_bytes = memory.within(0.9)
    assert memory.total // 4 < pool_bytes <= memory.free
    pool = torch.zeros(pool_bytes, dtype=torch.uint8, device=DEVICE)
    assert pool[-1].item() == 0


def decoded(model: Path, recorder: StepRecorder | None) -> list[Float32Array]:
    """Logits of decode steps of batches that grow and shrink, each fed the tokens of its prompt."""
    bench = EngineBench(engine_on(model, recorder), num_blocks=64)
    lanes = [bench.lane(PROMPT[number:], 0) for number in range(20)]
    for number, lane in enumerate(lanes):
        lane.num_prompt_tokens = 100 + 5 * number
        bench.step([lane], [lane.num_prompt_tokens])
    return [
        bench.step(lanes[:size], [1] * size).copy()
        for size in (1, 2, 3, 20, 7, 20, 1, 16, 9, 5, 20)
    ]


def test_graphs_give_the_bytes_of_the_same_steps_run_eagerly(tiny_model: MakeModel) -> None:
    recorded = decoded(tiny_model("qwen3"), None)
    eager = decoded(tiny_model("qwen3"), Eager())

    for one, other in zip(recorded, eager, strict=True):
        np.testing.assert_array_equal(one, other)
