"""Models over transformers' modules compute what those compute, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE

from pipeline.intake.hf_vocabulary import ModelFacts
from tests.workers.models.conftest import cuda_engine_on_the_cpu
from tests.workers.models.tiny_models import modules_configs, refused_configs
from workers.model import Float32Array, ModelRunner
from workers.models.bench import EngineBench
from workers.models.errors import ModelFilesMissing, ModelRefused
from workers.models.load import load_runner

PROMPT = [5, 77, 130, 9, 250, 31, 8] * 20
NAMES = tuple(modules_configs())
MakeModel = Callable[[str], Path]


def expected_of(directory: Path) -> Float32Array:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits: Float32Array = model(torch.tensor([PROMPT])).logits[0].numpy()
    return logits


def largest_error(runner: ModelRunner, expected: Float32Array) -> float:
    """Of three sequences at different places, in prefill chunks and decode; parts of the largest."""
    bench = EngineBench(runner)
    lanes = [bench.lane(PROMPT) for _ in range(3)]
    errors = []
    for number, lane in enumerate(lanes):
        lane.num_prompt_tokens = 70 + number
        bench.step([lane], [40 + 7 * number])
    for count in (1, 16, *[1] * 30):
        logits = bench.step(lanes, [count] * 3)
        errors += [
            np.abs(row - expected[lane.num_computed - 1]).max()
            for lane, row in zip(lanes, logits, strict=True)
        ]
    return float(max(errors) / np.abs(expected).max())


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_the_modules_alone(name: str, tiny_model: MakeModel) -> None:
    directory = tiny_model(name)

    assert largest_error(load_runner("torch", directory), expected_of(directory)) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_those_of_the_modules_alone(name: str, tiny_model: MakeModel) -> None:
    directory = tiny_model(name)
    tokens = EngineBench(load_runner("torch", directory)).generate(PROMPT, 20).tokens
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].argmax(dim=1).tolist()

    assert tokens[len(PROMPT) :] == expected[len(PROMPT) - 1 : -1]


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_bfloat16_and_the_cuda_operators_stay_near(name: str, tiny_model: MakeModel) -> None:
    directory = tiny_model(name)
    expected = expected_of(directory)

    assert largest_error(load_runner("torch", directory, dtype="bfloat16"), expected) < 0.1
    assert largest_error(cuda_engine_on_the_cpu(directory), expected) < 0.1


@pytest.mark.parametrize("name", refused_configs())
def test_what_blocks_of_keys_and_values_cannot_hold_is_refused_with_the_reason(
    name: str, tiny_model: MakeModel
) -> None:
    reason = refused_configs()[name][1]

    with pytest.raises(ModelRefused, match=reason):
        load_runner("torch", tiny_model(name))


def test_missing_weights_are_refused(tiny_model: MakeModel, tmp_path: Path) -> None:
    config = (tiny_model("gpt2") / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)

    with pytest.raises(ModelFilesMissing, match="safetensors"):
        load_runner("torch", tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_the_gateway_reads_the_context_that_the_engine_has(
    name: str, tiny_model: MakeModel
) -> None:
    directory = tiny_model(name)

    facts = ModelFacts.read(directory, Tokenizer(BPE()))

    assert facts.max_context == load_runner("torch", directory).spec.context_tokens == 512


def test_kv_computed_otherwise_has_another_name(tiny_model: MakeModel) -> None:
    runners = [load_runner("torch", tiny_model("gemma3"), dtype=d) for d in ("auto", "bfloat16")]

    assert runners[0].spec.layout.dtype == "float32"
    assert runners[0].spec.fingerprint != runners[1].spec.fingerprint
