"""Engines to test: the two test engines, and tiny models with random weights for torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from pipeline.script_book import Script, ScriptBook
from tests.workers.kernels.flash_stand_in import FLASH_3, StandIn
from tests.workers.models.tiny_models import (
    gguf_configs,
    modules_configs,
    refused_configs,
    tiny_configs,
)
from workers.kernels.cuda import CudaOperators
from workers.kernels.cuda_graphs import Eager
from workers.kernels.flash import Flash3
from workers.model import ModelRunner
from workers.models.digest import DigestRunner
from workers.models.load import load_runner
from workers.models.script import ScriptRunner
from workers.models.torch_runner import TorchRunner


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes (once) the directory of a tiny model, by its name in tiny_models."""
    made: dict[str, Path] = {}
    refused = {name: config for name, (config, _) in refused_configs().items()}
    configs = tiny_configs() | gguf_configs() | modules_configs() | refused

    def make(name: str) -> Path:
        if name not in made:
            torch.manual_seed(sum(name.encode()))
            model = transformers.AutoModelForCausalLM.from_config(configs[name])
            with torch.no_grad():
                for parameter in model.parameters():  # ones and zeros would hide a missing one
                    if parameter.dim() == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            made[name] = tmp_path_factory.mktemp("models") / name
            model.save_pretrained(made[name])
        return made[name]

    return make


EXACT_ENGINES = ["digest", "script", "torch-float32", "torch-auto", "torch-int8", "modules-auto"]


@pytest.fixture(params=EXACT_ENGINES)
def exact_runner(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> ModelRunner:
    """Engines whose tokens are the same however the work is cut into steps."""
    return small_engine(str(request.param), tiny_model)


@pytest.fixture(params=[*EXACT_ENGINES, "torch-bfloat16", "cuda-bfloat16"])
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
    if engine == "modules":
        return load_runner("torch", tiny_model("gemma3"), dtype=dtype)
    if engine == "cuda":
        return cuda_engine_on_the_cpu(tiny_model("llama"))
    return load_runner("torch", tiny_model("llama"), dtype=dtype)


def cuda_engine_on_the_cpu(model: Path, block_tokens: int = 16) -> TorchRunner:
    """All of the CUDA engine but CUDA: over a stand-in for flash-attn, recording no graphs."""
    flash = Flash3(StandIn(FLASH_3).module)
    operators = CudaOperators(flash, torch.device("cpu"), Eager(), max_blocks=512 // block_tokens)
    return TorchRunner(model, block_tokens=block_tokens, operators=operators)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Where converted models are kept between test runs."""
    default = Path.home() / ".cache" / "pointsman-tests"
    return Path(os.environ.get("POINTSMAN_TEST_DATA", default))
