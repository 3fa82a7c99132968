"""Rotary position embedding as Hugging Face configs describe it, in all their forms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from workers.models.config_refusals import Config
from workers.models.errors import ModelRefused


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    `factor` stretches positions: all of them ("linear"), or those of low frequency ("llama3",
    "yarn"); `short_factors` those of each frequency ("longrope" in contexts that are no longer than
    the original one). The other fields say how for the type that has them. `partial`: the share of a
    head's elements that is rotated.
    """

    theta: float
    rope_type: str = "default"
    partial: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncates: bool = True
    short_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RopeRules:
    """What a family knows of rope. types: as configs call them. default_theta: if a config has none."""

    types: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "longrope")
    rotates_partly: bool = False
    default_theta: float = 10_000.0


_ROPE_TYPES: Mapping[str, set[str]] = {  # and what each knows beside the fields of all
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
}
_ROPE_NAMES = {"su": "longrope"}  # as old files call them
_ROPE_FIELDS = {
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
}


def read_rope(name: str, config: Config, rules: RopeRules, head_dim: int) -> RopeConfig:
    """The rope of a model of this name. head_dim: elements of a head.

    Raises:
        ModelRefused: it cannot be computed exactly.
        KeyError, TypeError, ValueError: the config lacks a field, or has one that makes no sense.
    """
    fields = _rope_fields(config, rules)
    told_type = str(fields.get("rope_type", fields.get("type", "default")))
    if told_type not in rules.types:
        known = ", ".join(rules.types)
        raise ModelRefused(name, f"rope type {told_type} is not one of {known}")
    rope_type = _ROPE_NAMES.get(told_type, told_type)
    unknown = sorted(set(fields) - _ROPE_FIELDS - _ROPE_TYPES[rope_type])
    if unknown:
        raise ModelRefused(name, f"rope type {rope_type} has no {unknown[0]}")
    partial = float(fields.get("partial_rotary_factor", 1.0))
    if partial != 1.0 and not rules.rotates_partly:
        raise ModelRefused(name, "it rotates only a part of each head")
    plain = RopeConfig(float(fields["rope_theta"]), rope_type, partial)
    if rope_type == "default":
        return plain
    if rope_type == "longrope":
        return _long_rope_config(name, plain, config, fields, head_dim)
    plain = replace(plain, factor=float(fields["factor"]))
    if rope_type == "linear":
        return plain
    plain = replace(plain, original_context_tokens=_original_context(name, config, fields))
    if rope_type == "yarn":
        return _yarn_config(plain, fields)
    return replace(
        plain,
        low_freq_factor=float(fields["low_freq_factor"]),
        high_freq_factor=float(fields["high_freq_factor"]),
    )


def _original_context(name: str, config: Config, fields: Config) -> int:
    """Tokens of the context before it was stretched: the whole context, if the config is silent."""
    field = "original_max_position_embeddings"
    inside = fields.get(field, config.get(field, config["max_position_embeddings"]))
    if config.get(field, inside) != inside:
        raise ModelRefused(name, f"it has two {field}: {config[field]} and {inside}")
    return int(inside)


def _long_rope_config(
    name: str, plain: RopeConfig, config: Config, fields: Config, head_dim: int
) -> RopeConfig:
    """LongRoPE (Ding et al., 2024) within the original context; `exact_context` says why no further."""
    if "original_max_position_embeddings" not in {*fields, *config}:  # classes take it for various
        raise ModelRefused(name, "it does not say how long the original context of its rope was")
    context = _original_context(name, config, fields)
    factors = tuple(float(factor) for factor in fields["short_factor"])
    num_pairs = int(head_dim * plain.partial) // 2
    if len(factors) != num_pairs:
        raise ModelRefused(name, f"its short_factor has {len(factors)} numbers for {num_pairs}")
    factor = float(fields.get("factor") or config["max_position_embeddings"] / context)
    attention_factor = fields.get("attention_factor")
    if attention_factor is None:
        growth = math.log(factor) / math.log(context) if factor > 1 else 0.0
        attention_factor = math.sqrt(1 + growth)
    return replace(
        plain,
        original_context_tokens=context,
        attention_factor=float(attention_factor),
        short_factors=factors,
    )


def _yarn_config(plain: RopeConfig, fields: Config) -> RopeConfig:
    """YaRN (Peng et al., 2023), with the defaults of transformers."""
    attention_factor = fields.get("attention_factor")
    if attention_factor is None:
        above = float(fields.get("mscale") or 0)
        below = float(fields.get("mscale_all_dim") or 0)
        if not (above and below):
            above, below = 1.0, 0.0
        attention_factor = _temperature(plain.factor, above) / _temperature(plain.factor, below)
    return replace(
        plain,
        attention_factor=float(attention_factor),
        beta_fast=float(fields.get("beta_fast") or 32),
        beta_slow=float(fields.get("beta_slow") or 1),
        truncates=bool(fields.get("truncate", True)),
    )


def _temperature(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _rope_fields(config: Config, rules: RopeRules) -> Config:
    """Rope settings in the form of transformers 5, from that or the older one, which goes first."""
    outside = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    inside = config.get("rope_scaling") or config.get("rope_parameters") or {}
    told = [(name, value) for part in (outside, inside) for name, value in part.items()]
    return {"rope_theta": rules.default_theta} | {k: v for k, v in told if v is not None}
