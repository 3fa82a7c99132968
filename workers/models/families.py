"""Model families: reading a Hugging Face config, or saying why the model cannot be run exactly."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.models.errors import ModelFilesMissing, ModelRefused

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    `factor` stretches positions: all of them ("linear"), or those of low frequency ("llama3").
    """

    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything that shapes a decoder: pre-norm, grouped-query attention, gated MLP."""

    name: str
    vocab_size: int
    context_tokens: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    has_qkv_bias: bool
    has_out_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    ties_head: bool | None  # None: the config does not say, the weights decide
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Family:
    """What sets a family apart; a string names the config field (false if absent) that decides."""

    qkv_bias: bool | str
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm=True),
}

# Each says in words what a config asks for beyond this decoder; the first that holds is the reason.
_REFUSALS: tuple[tuple[str, Callable[[Config], bool]], ...] = (
    (
        "it is no causal language model",
        lambda config: (
            not all(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ())
        ),
    ),
    ("its weights are quantised", lambda config: bool(config.get("quantization_config"))),
    ("it uses a sliding window", lambda config: bool(config.get("use_sliding_window"))),
    (
        "it has layers other than full attention",
        lambda config: any(kind != "full_attention" for kind in config.get("layer_types") or ()),
    ),
    (
        "its activation is not silu",
        lambda config: config.get("hidden_act", "silu") not in ("silu", "swish"),
    ),
    (
        "it rotates only a part of each head",
        lambda config: _rope_fields(config).get("partial_rotary_factor", 1.0) != 1.0,
    ),
)


def read_config(directory: Path) -> DecoderConfig:
    """The config of a Hugging Face model directory.

    Raises:
        ModelFilesMissing: there is no config.json, or it lacks a field.
        ModelRefused: the model cannot be run exactly.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ModelFilesMissing(str(directory), "config.json")
    config: Config = json.loads(path.read_bytes())
    generation_path = directory / "generation_config.json"
    generation = json.loads(generation_path.read_bytes()) if generation_path.is_file() else {}
    try:
        return _decoder_config(directory.name, config, generation)
    except KeyError as error:
        raise ModelFilesMissing(str(path), f"field {error.args[0]}") from error


def _decoder_config(name: str, config: Config, generation: Config) -> DecoderConfig:
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise ModelRefused(
            name, f"family {config.get('model_type')} is not one of {', '.join(FAMILIES)}"
        )
    for reason, holds in _REFUSALS:
        if holds(config):
            raise ModelRefused(name, reason)

    def decide(flag: bool | str) -> bool:  # noqa: FBT001  # a field name or the answer itself
        return bool(config.get(flag, False)) if isinstance(flag, str) else flag

    num_heads = config["num_attention_heads"]
    return DecoderConfig(
        name=name,
        vocab_size=config["vocab_size"],
        context_tokens=config["max_position_embeddings"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=_head_dim(config),
        norm_eps=config["rms_norm_eps"],
        rope=_rope_config(name, config),
        has_qkv_bias=decide(family.qkv_bias),
        has_out_bias=decide(family.out_bias),
        has_mlp_bias=decide(family.mlp_bias),
        has_qk_norm=family.qk_norm,
        ties_head=config.get("tie_word_embeddings"),
        eos_token_ids=_token_ids(config) | _token_ids(generation),
    )


def _head_dim(config: Config) -> int:
    if config.get("head_dim"):
        return int(config["head_dim"])
    if config["model_type"] == "qwen3":  # its default is a number of its own
        raise KeyError("head_dim")
    return int(config["hidden_size"] // config["num_attention_heads"])


def _token_ids(config: Config) -> frozenset[int]:
    value = config.get("eos_token_id")
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])


def _rope_fields(config: Config) -> Config:
    """Rope settings in the form of transformers 5, from that or the older one."""
    fields: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10_000.0)}
    if "partial_rotary_factor" in config:
        fields["partial_rotary_factor"] = config["partial_rotary_factor"]
    fields.update(config.get("rope_scaling") or {})
    fields.update(config.get("rope_parameters") or {})
    return fields


def _rope_config(name: str, config: Config) -> RopeConfig:
    fields = _rope_fields(config)
    rope_type = fields.get("rope_type", fields.get("type", "default"))
    theta = float(fields["rope_theta"])
    if rope_type == "default":
        return RopeConfig(theta)
    if rope_type == "linear":
        return RopeConfig(theta, rope_type, float(fields["factor"]))
    if rope_type == "llama3":
        return RopeConfig(
            theta,
            rope_type,
            float(fields["factor"]),
            float(fields["low_freq_factor"]),
            float(fields["high_freq_factor"]),
            int(fields["original_max_position_embeddings"]),
        )
    raise ModelRefused(name, f"rope type {rope_type} is not one of default, linear, llama3")
