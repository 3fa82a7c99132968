"""The torch engine computes what Hugging Face computes, or refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.workers.kernels.flash_stand_in import FLASH_2, StandIn
from tests.workers.models.conftest import cuda_engine_on_the_cpu
from tests.workers.models.tiny_models import TINY_NAMES, copied, logits_of
from workers.kernels.reference import ReferenceOperators
from workers.models.bench import EngineBench
from workers.models.errors import ModelFilesMissing, ModelRefused
from workers.models.load import load_runner
from workers.models.torch_runner import TorchRunner

PROMPT = [5, 77, 130, 9, 250, 31, 8] * 20
MakeModel = Callable[[str], Path]


@pytest.mark.parametrize("name", TINY_NAMES)
def test_logits_equal_those_of_hugging_face(name: str, tiny_model: MakeModel) -> None:
    directory = tiny_model(name)
    bench = EngineBench(load_runner("torch", directory))
    expected = logits_of(directory, PROMPT)

    lane = bench.lane(PROMPT)
    for count in (50, 1, 16, 73):
        logits = bench.step([lane], [count])
        np.testing.assert_allclose(logits[0], expected[lane.num_computed - 1], atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_greedy_tokens_equal_those_of_hugging_face(name: str, tiny_model: MakeModel) -> None:
    directory = tiny_model(name)
    tokens = EngineBench(load_runner("torch", directory)).generate(PROMPT, 40).tokens

    expected = logits_of(directory, tokens).argmax(dim=1).tolist()

    assert tokens[len(PROMPT) :] == expected[len(PROMPT) - 1 : -1]


def in_bfloat16(directory: Path, form: str) -> TorchRunner:
    """An engine of the native form where this machine has it, of the reference, of the CUDA form."""
    if form == "cuda":
        return cuda_engine_on_the_cpu(directory)
    if form == "reference":
        return TorchRunner(directory, operators=ReferenceOperators(torch.bfloat16))
    return TorchRunner(directory, dtype="bfloat16")


@pytest.mark.parametrize("form", ["fastest", "reference", "cuda"])
@pytest.mark.parametrize("name", TINY_NAMES)
def test_bfloat16_is_as_near_to_float32_as_hugging_faces_own(
    name: str, form: str, tiny_model: MakeModel
) -> None:
    """In prefill, in a chunk and in decode, within a fourth: on average ours is nearer."""
    directory = tiny_model(name)
    exact = logits_of(directory, PROMPT)
    theirs = (logits_of(directory, PROMPT, torch.bfloat16) - exact).abs()
    bench = EngineBench(in_bfloat16(directory, form))
    lanes = [bench.lane(PROMPT) for _ in range(3)]
    for lane in lanes:
        lane.num_prompt_tokens = 132

    ours, rows = [], []
    for count in (50, 16, 66, *[1] * 8):
        logits = bench.step(lanes, [count] * 3)
        rows.append(lanes[0].num_computed - 1)
        ours.append(np.abs(logits - exact[rows[-1]].numpy()))

    assert np.mean(ours) <= 1.25 * theirs[rows].mean()
    assert np.max(ours) <= theirs.max()


def test_shards_are_read_as_one_file_is(tiny_model: MakeModel, tmp_path: Path) -> None:
    whole = tiny_model("qwen3")
    model = transformers.AutoModelForCausalLM.from_pretrained(whole)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    one, other = (EngineBench(load_runner("torch", directory)) for directory in (whole, tmp_path))

    assert one.generate(PROMPT, 8).tokens == other.generate(PROMPT, 8).tokens


def test_an_incomplete_set_of_shards_is_refused(tiny_model: MakeModel, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"))
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    shard = next(tmp_path.glob("*-00002-*"))
    shard.unlink()

    with pytest.raises(ModelFilesMissing, match=shard.name):
        load_runner("torch", tmp_path)


def test_an_unknown_type_of_numbers_is_refused(tiny_model: MakeModel) -> None:
    with pytest.raises(ModelRefused, match="float16 is not one of"):
        load_runner("torch", tiny_model("llama"), dtype="float16")


@pytest.mark.parametrize(
    ("module", "dtype", "block_tokens", "reason"),
    [
        (None, "auto", 256, "needs flash-attn: pip install"),
        (StandIn(FLASH_2).module, "auto", 16, "blocks of a multiple of 256 tokens"),
        (StandIn(FLASH_2).module, "float32", 256, "bfloat16 only"),
    ],
)
def test_a_gpu_that_cannot_run_it_is_refused_with_the_reason_before_anything_is_loaded(
    module: Any,
    dtype: str,
    block_tokens: int,
    reason: str,
    tiny_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn", module)

    with pytest.raises(ModelRefused, match=reason):
        load_runner(
            "torch", tiny_model("llama"), dtype=dtype, block_tokens=block_tokens, device="cuda"
        )


def test_ends_of_text_are_those_of_both_configs(tiny_model: MakeModel, tmp_path: Path) -> None:
    directory = copied(tiny_model("llama"), tmp_path, eos_token_id=7)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')

    assert load_runner("torch", directory).spec.eos_token_ids == {2, 7, 9}


def test_the_fingerprint_changes_with_weights_tokenizer_config_and_type(
    tiny_model: MakeModel, tmp_path: Path
) -> None:
    original = tiny_model("llama")
    directory = copied(original, tmp_path)
    seen = [load_runner("torch", directory).spec.fingerprint]
    seen.append(load_runner("torch", directory, dtype="bfloat16").spec.fingerprint)
    (directory / "tokenizer.json").write_text("{}")
    seen.append(load_runner("torch", directory).spec.fingerprint)
    copied(original, tmp_path, rms_norm_eps=1e-5)
    seen.append(load_runner("torch", directory).spec.fingerprint)
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] + 1e-3
    save_file(weights, directory / "model.safetensors")
    seen.append(load_runner("torch", directory).spec.fingerprint)

    assert len(set(seen)) == 5
    assert load_runner("torch", directory).spec.fingerprint == seen[-1]
