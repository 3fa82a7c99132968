"""The weights and the config inside a GGUF file, as a Hugging Face directory has them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from workers.models.errors import ModelRefused

Fields = Mapping[str, Any]
Array = npt.NDArray[Any]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
_PAIRED = {"llama", "smollm3"}  # llama.cpp rotates neighbours of a head there, not halves
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OWN_NAMES = {"phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}}
_TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<name>\w+)\.(?P<kind>weight|bias)")
_ROPE_DIVISORS = "rope_freqs.weight"
_LONG_ROPE = {
    "rope_factors_short.weight": "short_factor",
    "rope_factors_long.weight": "long_factor",
}
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_FULL_PRECISION = {
    GGMLQuantizationType.F32: "F32",
    GGMLQuantizationType.F16: "F16",
    GGMLQuantizationType.BF16: "BF16",
}
# The fields of a model that are read here, and those that say nothing of what it computes.
_KNOWN_FIELDS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_used_count",  # of none
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
}
_OWN_FIELDS = {"phi3": {"attention.sliding_window", "rope.scaling.attn_factor"}}
_TYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor to write: name and shape as Hugging Face has them, its type, how to get its data."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Array]


def read_fields(reader: GGUFReader) -> dict[str, Any]:
    """All fields of a GGUF file, decoded."""
    return {name: field.contents() for name, field in reader.fields.items()}


def hugging_face_config(fields: Fields, model: str, tensors: Container[str]) -> dict[str, Any]:
    """The config.json of a GGUF model; `tensors` are the names of those in the file.

    Raises:
        ModelRefused: the architecture, or a feature that its fields name, is not known.
    """
    architecture = fields.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelRefused(model, f"architecture {architecture} is not one of {known}")
    own = {
        name.removeprefix(f"{architecture}."): value
        for name, value in fields.items()
        if name.startswith(f"{architecture}.")
    }
    _refuse_what_is_not_read(own, fields, model)
    num_heads = own["attention.head_count"]
    head_dim = own.get("attention.key_length", own["embedding_length"] // num_heads)
    if architecture != "phi3" and own.get("rope.dimension_count", head_dim) != head_dim:
        raise ModelRefused(model, "it rotates a part of each head")
    if own.get("attention.value_length", head_dim) != head_dim:
        raise ModelRefused(model, "its keys and values have different sizes")
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": _shortest(own.get("rope.freq_base", 10_000.0)),
    }
    if own.get("rope.scaling.type") == "linear":
        rope.update(rope_type="linear", factor=_shortest(own["rope.scaling.factor"]))
    config = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": own.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(own["attention.layer_norm_rms_epsilon"]),
        "max_position_embeddings": own["context_length"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "bfloat16",
    }
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_down.bias"}
    config |= {name: True for name, tensor in biases.items() if tensor in tensors}
    if architecture == "phi3":
        config |= _phi3_fields(own, rope, head_dim, model)
    return config | special_token_ids(fields)


def _phi3_fields(own: Fields, rope: Fields, head_dim: int, model: str) -> dict[str, Any]:
    """Its window, the part of a head that it rotates, and the context before it was stretched."""
    if "attention.sliding_window" not in own:  # llama.cpp guesses it from the model's size
        raise ModelRefused(model, "it does not say what its sliding window is: convert it anew")
    more: dict[str, Any] = {
        "partial_rotary_factor": own.get("rope.dimension_count", head_dim) / head_dim
    }
    if "rope.scaling.attn_factor" in own:
        more["attention_factor"] = _shortest(own["rope.scaling.attn_factor"])
    original = own.get("rope.scaling.original_context_length", own["context_length"])
    return {
        "sliding_window": int(own["attention.sliding_window"]) or None,
        "original_max_position_embeddings": int(original),
        "rope_parameters": {**rope, **more},
    }


def _refuse_what_is_not_read(own: Fields, fields: Fields, model: str) -> None:
    """A field that nobody reads would be missing from the computation; zeros ask for nothing."""
    known = _KNOWN_FIELDS | _OWN_FIELDS.get(fields["general.architecture"], set())
    unknown = sorted(name for name, value in own.items() if name not in known and value)
    if unknown:
        raise ModelRefused(model, f"its field {unknown[0]} is not known")
    by_layer = sorted(name for name, value in own.items() if isinstance(value, list))
    if by_layer:
        raise ModelRefused(model, f"its layers differ in {by_layer[0]}")
    if own.get("rope.scaling.type", "none") not in ("none", "linear"):
        raise ModelRefused(model, f"rope scaling {own['rope.scaling.type']} is not known")
    if fields.get("split.count", 1) > 1:
        raise ModelRefused(model, "it is one part of several: join them with llama-gguf-split")


def stretched_rope(reader: GGUFReader, config: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The config's rope settings, with those that llama.cpp keeps as a tensor of divisors.

    Llama 3.1 and later stretch low frequencies. The divisors tell the factor; that the other three
    numbers are Meta's is checked by computing all divisors from them. LongRoPE's are its factors.

    Raises:
        ModelRefused: the divisors are others.
    """
    rope: dict[str, Any] = dict(config["rope_parameters"])
    told = {t.name: t.data for t in reader.tensors if t.name in (_ROPE_DIVISORS, *_LONG_ROPE)}
    if _LONG_ROPE.keys() <= told.keys():
        factors = {name: told[tensor].tolist() for tensor, name in _LONG_ROPE.items()}
        return rope | {"rope_type": "longrope"} | factors
    divisors = told.get(_ROPE_DIVISORS)
    if divisors is None:
        return rope
    factor = float(divisors.max())
    inverse = rope["rope_theta"] ** (-np.arange(0, config["head_dim"], 2) / config["head_dim"])
    turns = _LLAMA3["original_max_position_embeddings"] * inverse / (2 * np.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ModelRefused(model, "its rope divisors are not those of Llama 3")
    return rope | {"rope_type": "llama3", "factor": factor} | _LLAMA3


def special_token_ids(fields: Fields) -> dict[str, Any]:
    """Ids of begin, end and padding, as config.json and generation_config.json name them."""
    names = {"bos_token_id": "bos", "pad_token_id": "padding"}
    ids = {name: fields.get(f"tokenizer.ggml.{short}_token_id") for name, short in names.items()}
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    unique = sorted({token_id for token_id in ends if token_id is not None})
    ids["eos_token_id"] = unique[0] if len(unique) == 1 else unique or None
    return ids


def write_safetensors(
    reader: GGUFReader, config: Mapping[str, Any], path: Path, report: Callable[[float], None]
) -> None:
    """Write all weights; `report` is told the share written.

    Tensors in full precision keep their type. Quantised ones become bfloat16: its rounding (2^-9)
    is far below a quantisation step, and twice the file would hold nothing more. One tensor at a
    time is in memory.

    Raises:
        ModelRefused: the file has a tensor that is not known.
    """
    weights = list(_weights(reader, config, path.parent.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        start, end = end, end + int(np.prod(weight.shape)) * _TYPE_BYTES[weight.dtype]
        header[weight.name] = {
            "dtype": weight.dtype,
            "shape": weight.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for weight in weights:
            file.write(np.ascontiguousarray(weight.read()).data)
            report(header[weight.name]["data_offsets"][1] / end)


def _weights(reader: GGUFReader, config: Mapping[str, Any], model: str) -> Iterator[_Weight]:
    family = config["model_type"]
    names = _NAMES | _OWN_NAMES.get(family, {})
    in_config = {_ROPE_DIVISORS, *(_LONG_ROPE if family == "phi3" else ())}  # see `stretched_rope`
    for tensor in reader.tensors:
        if tensor.name in in_config:
            continue
        match = _TENSOR_NAME.fullmatch(tensor.name)
        if match is None or match["name"] not in names:
            raise ModelRefused(model, f"its tensor {tensor.name} is not known")
        layer = "" if match["layer"] is None else f"model.layers.{match['layer']}."
        num_heads = None
        if family in _PAIRED:
            heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
            num_heads = config.get(heads.get(match["name"], ""))
        yield _Weight(
            name=f"{layer}{names[match['name']]}.{match['kind']}",
            shape=tuple(int(size) for size in reversed(tensor.shape)),
            dtype=_FULL_PRECISION.get(tensor.tensor_type, "BF16"),
            read=_reader_of(tensor.data, tensor.tensor_type, num_heads),
        )


def _reader_of(
    data: Array, kind: GGMLQuantizationType, num_heads: int | None
) -> Callable[[], Array]:
    def read() -> Array:
        if kind == GGMLQuantizationType.BF16:
            values: Array = data.view(np.uint16)
        elif kind in _FULL_PRECISION:
            values = data
        else:
            values = _to_bfloat16(dequantize(data, kind))
        return values if num_heads is None else _halves_from_pairs(values, num_heads)

    return read


def _halves_from_pairs(values: Array, num_heads: int) -> Array:
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even; the bits of a bfloat16 are the upper half of a float32's."""
    bits = values.view(np.uint32)
    rounding = ((bits >> 16) & 1) + np.uint32(0x7FFF)
    return ((bits + rounding) >> 16).astype(np.uint16)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
