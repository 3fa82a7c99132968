"""Whatever a config asks for is computed as Hugging Face computes it, or refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

from pipeline.intake.hf_vocabulary import ModelFacts
from tests.workers.models.tiny_models import LONG_ROPE, NUM_ORIGINAL, copied, logits_of
from workers.models.bench import EngineBench
from workers.models.errors import ModelFilesMissing, ModelRefused
from workers.models.families import read_config
from workers.models.load import load_runner

PROMPT = [5, 77, 130, 9, 250, 31, 8] * 20
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LAYERS = ["full_attention", "sliding_attention", "full_attention"]
WINDOW = {"use_sliding_window": True, "sliding_window": 20}
ORIGINAL = {"original_max_position_embeddings": NUM_ORIGINAL}
SU_ROPE = LONG_ROPE | ORIGINAL | {"type": "su", "partial_rotary_factor": 0.75}
del SU_ROPE["rope_type"]
LLAMA_LONG_ROPE = LONG_ROPE | {
    "short_factor": [1.0 + number / 5 for number in range(8)],
    "long_factor": [4.0] * 8,
    **ORIGINAL,
}
ORIGINAL_UNTOLD = {
    "original_max_position_embeddings": ...,
    "rope_parameters": LONG_ROPE | {"partial_rotary_factor": 0.75},
}
Weights = dict[str, torch.Tensor]
MakeModel = Callable[[str], Path]


def with_weights(directory: Path, change: Callable[[Weights], Weights]) -> Path:
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return directory


def assert_right(directory: Path) -> None:
    bench = EngineBench(load_runner("torch", directory))
    expected = logits_of(directory, PROMPT)
    lane = bench.lane(PROMPT)
    for count in (75, 65):
        logits = bench.step([lane], [count])[0]
        np.testing.assert_allclose(logits, expected[lane.num_computed - 1], atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"rope_parameters": ..., "rope_theta": 500.0}),
        ("llama", {"rope_parameters": ...}),
        ("llama", {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 3.0}}),
        ("llama", {"rope_scaling": YARN | {"rope_theta": 300.0}}),
        ("llama", {"rope_parameters": ..., "rope_scaling": LLAMA3, "rope_theta": 300.0}),
        ("llama", {"rope_parameters": YARN, "max_position_embeddings": 200}),
        ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 200}),
        ("yarn", {"rope_parameters": YARN | {"attention_factor": 1.5}}),
        ("yarn", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}}),
        ("yarn", {"rope_parameters": YARN | {"beta_fast": 20.0, "beta_slow": 2.0}}),
        ("yarn", {"rope_parameters": YARN | {"truncate": False}}),
        ("llama", {"architectures": ["LLaMAForCausalLM"]}),
        ("llama", {"pretraining_tp": 2, "attention_dropout": 0.1, "num_experts": 0}),
        ("llama", {"sliding_window": 20, "use_sliding_window": False}),
        ("mistral", {"sliding_window": None}),
        ("phi3-partial", {"rope_parameters": ..., "partial_rotary_factor": 0.5}),
        ("phi3-long", {}),
        ("phi3-long", {"rope_parameters": SU_ROPE}),
        ("phi3-long", {"rope_parameters": ..., "rope_scaling": SU_ROPE, "rope_theta": 300.0}),
        ("phi3-long", {"rope_parameters": SU_ROPE | {"factor": 16.0}}),
        ("phi3-long", {"rope_parameters": SU_ROPE | {"attention_factor": 1.3}}),
        ("phi3-long", {"max_position_embeddings": 180}),
        ("llama", {"rope_parameters": LLAMA_LONG_ROPE}),
        ("llama", {"rope_parameters": LLAMA3, "original_max_position_embeddings": 64}),
        ("qwen2-window", {"layer_types": LAYERS}),
        ("qwen3", {"layer_types": LAYERS, **WINDOW}),
        ("qwen3", {"layer_types": LAYERS, "use_sliding_window": True, "sliding_window": 20}),
        ("smollm3", {"rope_parameters": ..., "no_rope_layers": [0, 1, 1]}),
        ("smollm3", {"layer_types": LAYERS, **WINDOW}),
    ],
)
def test_the_compact_decoder_reads_a_config_as_hugging_face_does(
    name: str, changes: dict[str, Any], tiny_model: MakeModel, tmp_path: Path
) -> None:
    directory = copied(tiny_model(name), tmp_path / "model", **changes)

    read_config(directory)  # so it is the compact one
    assert_right(directory)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2-window", {"layer_types": ...}),
        ("smollm3", {"layer_types": ..., **WINDOW}),
        ("llama", {"partial_rotary_factor": 1.0, "rope_parameters": {"rope_type": "default"}}),
        ("phi3-long", {"hidden_act": "gelu"}),
        ("phi3-long", ORIGINAL_UNTOLD),
    ],
)
def test_what_is_left_to_the_modules_is_right_too(
    name: str, changes: dict[str, Any], tiny_model: MakeModel, tmp_path: Path
) -> None:
    assert_right(copied(tiny_model(name), tmp_path / "model", **changes))


@pytest.mark.parametrize("activation", ["silu", "gelu"])  # the compact decoder, the modules
def test_a_long_rope_ends_with_the_original_context(
    activation: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    directory = copied(tiny_model("phi3-long"), tmp_path / "model", hidden_act=activation)
    tokens = (PROMPT * 3)[: NUM_ORIGINAL + 1]
    expected = logits_of(directory, tokens[:-1])
    bench = EngineBench(load_runner("torch", directory))
    lane = bench.lane(tokens[:-1])

    for count in (150, NUM_ORIGINAL - 151, 1):
        logits = bench.step([lane], [count])[0]
        np.testing.assert_allclose(logits, expected[lane.num_computed - 1], atol=2e-4, rtol=0)

    facts = ModelFacts.read(directory, Tokenizer(BPE()))
    assert facts.max_context == bench.runner.spec.context_tokens == NUM_ORIGINAL
    difference = logits_of(directory, tokens)[:-1] - expected
    assert difference.abs().amax(dim=1).max() > 0.1, "one token more, and all angles are others"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"n_routed_experts": 8}, "n_routed_experts"),
        ({"residual_multiplier": 0.22}, "residual_multiplier"),
        ({"query_pre_attn_scalar": 144}, "query_pre_attn_scalar"),
        ({"use_qk_norm": True}, "use_qk_norm"),
        ({"no_rope_layers": [1, 1, 0]}, "no_rope_layers"),
        ({"sliding_window": 20}, "sliding_window"),
        ({"is_causal": False}, "no causal"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no causal"),
        ({"architectures": ["LlamaVariantForCausalLM"]}, "is LlamaVariantForCausalLM, not Llama"),
        ({"model_type": "gpt2"}, "is LlamaForCausalLM, not GPT2LMHeadModel"),
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"model_type": "t5"}, "no causal language model"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"compression_config": {"format": "int-quantized"}}, "quantised"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}}, "ntk"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"head_dim": 15}, "15|fail"),
        ({"head_dim": ..., "num_attention_heads": 7}, "multiple"),
        ({"num_key_value_heads": 4}, "multiple|fail|not those of its config"),
        ({"num_hidden_layers": 2}, "unknown use"),
        ({"intermediate_size": 81}, "not \\(81, 48\\)"),
        ({"num_attention_heads": 0}, r"not \(0, 48\)"),
        ({"rope_parameters": ["default"]}, "list|rope"),
        ({"rms_norm_eps": "small"}, "small|rms_norm_eps"),
    ],
)
def test_what_would_be_wrong_in_silence_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    directory = copied(tiny_model("llama"), tmp_path / "model", **changes)

    with pytest.raises(ModelRefused, match=reason):
        load_runner("torch", directory)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("mistral", {"sliding_window": 0}, "0 tokens|mask|fail|off by"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "longrope"),
        ("phi3-long", {"rope_parameters": LONG_ROPE}, "length 8, got 6"),
        ("phi3-long", ORIGINAL_UNTOLD | {"max_position_embeddings": 8192}, "after 4096 tokens"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "longrope"),
        ("qwen2", {"layer_types": LAYERS}, "sliding"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers|fail|index"),
    ],
)
def test_contradictions_of_a_family_are_refused(
    name: str, changes: dict[str, Any], reason: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    directory = copied(tiny_model(name), tmp_path / "model", **changes)

    with pytest.raises(ModelRefused, match=reason):
        load_runner("torch", directory)


def test_a_head_beside_a_tied_embedding_must_be_the_same(
    tiny_model: MakeModel, tmp_path: Path
) -> None:
    directory = copied(tiny_model("llama"), tmp_path / "model")
    embedding = "model.embed_tokens.weight"
    with_weights(directory, lambda own: own | {"lm_head.weight": own[embedding].clone()})
    assert_right(directory)

    with_weights(directory, lambda own: own | {"lm_head.weight": own[embedding] * 1.5})
    with pytest.raises(ModelRefused, match="ties the head"):
        load_runner("torch", directory)


def test_a_model_whose_files_hold_no_head_is_tied_where_the_config_is_silent(
    tiny_model: MakeModel, tmp_path: Path
) -> None:
    tied = tiny_model("llama")
    silent = copied(tied, tmp_path / "model", tie_word_embeddings=...)

    one, other = (EngineBench(load_runner("torch", directory)) for directory in (tied, silent))

    assert one.generate(PROMPT, 8).tokens == other.generate(PROMPT, 8).tokens


def test_a_head_of_its_own_is_used_where_the_config_is_silent(
    tiny_model: MakeModel, tmp_path: Path
) -> None:
    assert_right(copied(tiny_model("linear"), tmp_path / "model", tie_word_embeddings=...))


LAYER = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda own: {f"{LAYER}.weight": own.to(torch.int8)}, "int8"),
        (
            lambda own: {
                f"{LAYER}.weight": own.to(torch.float8_e4m3fn),
                f"{LAYER}.weight_scale_inv": torch.ones(1),
            },
            "weight_scale_inv",
        ),
        (lambda own: {f"{LAYER}.qweight": own.to(torch.int32)}, "qweight"),
        (lambda own: {f"{LAYER}.bias": torch.ones(len(own))}, "down_proj.bias"),
    ],
)
def test_weights_that_are_packed_without_a_word_in_the_config_are_refused(
    change: Callable[[torch.Tensor], Weights], reason: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    directory = copied(tiny_model("llama"), tmp_path / "model")
    with_weights(directory, lambda own: own | change(own[f"{LAYER}.weight"]))

    with pytest.raises(ModelRefused, match=reason):
        load_runner("torch", directory)


def test_a_directory_with_an_adapter_is_refused(tiny_model: MakeModel, tmp_path: Path) -> None:
    directory = copied(tiny_model("llama"), tmp_path / "model")
    (directory / "adapter_config.json").write_text("{}")

    with pytest.raises(ModelRefused, match="adapter"):
        load_runner("torch", directory)


@pytest.mark.parametrize("text", ["{", "[1, 2]"])
def test_a_config_that_is_no_object_is_refused(
    text: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    directory = copied(tiny_model("llama"), tmp_path / "model")
    (directory / "config.json").write_text(text)

    with pytest.raises(ModelRefused, match=r"config\.json is no JSON"):
        load_runner("torch", directory)


def test_a_file_of_weights_that_is_cut_short_is_refused(
    tiny_model: MakeModel, tmp_path: Path
) -> None:
    directory = copied(tiny_model("llama"), tmp_path / "model")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])

    with pytest.raises(ModelRefused, match=r"model\.safetensors"):
        load_runner("torch", directory)


@pytest.mark.parametrize("field", ["hidden_size", "rms_norm_eps", "num_attention_heads"])
def test_a_config_that_lacks_a_field_is_named_with_it(
    field: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    directory = copied(tiny_model("llama"), tmp_path / "model", **{field: ...})

    with pytest.raises(ModelFilesMissing, match=field):
        load_runner("torch", directory)
