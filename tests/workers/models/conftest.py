"""Engines to test: the two test engines, and tiny models with random weights for torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pipeline.script_book import Script, ScriptBook
from workers.model import ModelRunner
from workers.models.digest import DigestRunner
from workers.models.load import load_runner
from workers.models.script import ScriptRunner

TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_configs() -> dict[str, Any]:
    without_head_dim = {**TINY, "hidden_size": 96}
    del without_head_dim["head_dim"]
    return {
        "llama": transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
        "llama3": transformers.LlamaConfig(
            **TINY, rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True
        ),
        "linear": transformers.LlamaConfig(
            **TINY, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
        ),
        "qwen2": transformers.Qwen2Config(**without_head_dim),
        "qwen3": transformers.Qwen3Config(**TINY, tie_word_embeddings=True),
    }


TINY_NAMES = ("llama", "llama3", "linear", "qwen2", "qwen3")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes (once) the directory of a tiny model, by its name in TINY_NAMES."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            torch.manual_seed(sum(name.encode()))
            model = transformers.AutoModelForCausalLM.from_config(tiny_configs()[name])
            with torch.no_grad():
                for parameter in model.parameters():  # ones and zeros would hide a missing one
                    if parameter.dim() == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            made[name] = tmp_path_factory.mktemp("models") / name
            model.save_pretrained(made[name])
        return made[name]

    return make


EXACT_ENGINES = ["digest", "script", "torch-float32"]


@pytest.fixture(params=EXACT_ENGINES)
def exact_runner(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> ModelRunner:
    """Engines whose tokens are the same however the work is cut into steps."""
    return small_engine(str(request.param), tiny_model)


@pytest.fixture(params=[*EXACT_ENGINES, "torch-bfloat16"])
def runner(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> ModelRunner:
    """Every engine, small."""
    return small_engine(str(request.param), tiny_model)


def small_engine(name: str, tiny_model: Callable[[str], Path]) -> ModelRunner:
    engine, _, dtype = name.partition("-")
    if engine == "digest":
        return DigestRunner()
    if engine == "script":
        script = Script(pieces=tuple("abcdefghijklmnopqrstuvwxyz"), logprob=-0.1)
        return ScriptRunner(ScriptBook(scripts={"default": script}))
    return load_runner("torch", tiny_model("llama"), dtype=dtype)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Where converted models are kept between test runs."""
    default = Path.home() / ".cache" / "pointsman-tests"
    return Path(os.environ.get("POINTSMAN_TEST_DATA", default))
