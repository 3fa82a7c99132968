"""Model families: reading a Hugging Face config, or saying why the model cannot be run exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.intake.context_length import exact_context
from workers.models.config_refusals import Config, read_json, refuse_untold
from workers.models.errors import ModelFilesMissing, ModelRefused
from workers.models.model_facts import ModelFacts, token_ids_of
from workers.models.rope_config import RopeConfig, RopeRules, read_rope


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything that shapes a decoder: pre-norm, grouped-query attention, gated MLP.

    For each layer: `windows`, how many tokens a token sees, itself included, 0 for all; `rotates`,
    whether it knows positions. `joins_weights`: the files hold q, k, v as one, and gate, up too.
    """

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
    windows: tuple[int, ...]
    rotates: tuple[bool, ...]
    joins_weights: bool
    has_qkv_bias: bool
    has_out_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    ties_head: bool | None  # None: the config does not say, the weights decide
    eos_token_ids: frozenset[int]

    @property
    def facts(self) -> ModelFacts:
        """What the runner must know of it."""
        return ModelFacts(
            name=self.name,
            vocab_size=self.vocab_size,
            context_tokens=self.context_tokens,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            eos_token_ids=self.eos_token_ids,
            product_widths=(
                self.hidden_size,
                self.intermediate_size,
                self.num_heads * self.head_dim,
            ),
        )


_USUAL_ROPE = RopeRules()


@dataclass(frozen=True, slots=True)
class Family:
    """What sets a family apart; a string names the config field (false if absent) that decides.

    `architecture`: the class of transformers that computes the same. `window`: "none", "all" layers
    have the config's `sliding_window` (`default_window` if it has no such field), or "typed": those
    that `layer_types` names, if `use_sliding_window` says so.
    """

    architecture: str
    qkv_bias: bool | str
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: Literal["none", "all", "typed"] = "none"
    default_window: int | None = None
    rope: RopeRules = _USUAL_ROPE
    skips_rope: bool = False
    joins_weights: bool = False

    @property
    def own_fields(self) -> set[str]:
        """Those that are read of the fields by which decoders differ."""
        windows = {"sliding_window"} if self.window != "none" else set()
        return windows | ({"no_rope_layers"} if self.skips_rope else set())


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "mistral": Family("MistralForCausalLM", qkv_bias=False, window="all", default_window=4096),
    "phi3": Family(
        "Phi3ForCausalLM",
        qkv_bias=False,
        window="all",
        rope=RopeRules(types=("default", "longrope", "su"), rotates_partly=True),
        joins_weights=True,
    ),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, window="typed", default_window=4096),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm=True,
        window="typed",
        default_window=4096,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        window="typed",
        rope=RopeRules(default_theta=2_000_000.0),
        skips_rope=True,
    ),
}
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def read_config(directory: Path) -> DecoderConfig:
    """The config of a Hugging Face model directory.

    Raises:
        ModelFilesMissing: there is no config.json, or it lacks a field.
        ModelRefused: the model cannot be run exactly.
    """
    path = directory / "config.json"
    config = read_json(path)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        known = ", ".join(FAMILIES)
        raise ModelRefused(
            directory.name, f"family {config.get('model_type')} is not one of {known}"
        )
    refuse_untold(directory, config, family.own_fields, family.architecture)
    try:
        decoder = _decoder_config(directory.name, config, generation, family)
    except KeyError as error:
        raise ModelFilesMissing(str(path), f"field {error.args[0]}") from error
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise ModelRefused(directory.name, f"its config makes no sense: {error}") from error
    _refuse_odd_shapes(decoder)
    return decoder


def _refuse_odd_shapes(config: DecoderConfig) -> None:
    num_rotated = int(config.head_dim * config.rope.partial)
    if config.num_heads % config.num_kv_heads:
        raise ModelRefused(config.name, "its query heads are no multiple of its key heads")
    if num_rotated % 2 or not 0 < num_rotated <= config.head_dim:
        raise ModelRefused(config.name, f"it rotates {num_rotated} elements of {config.head_dim}")
    if len(config.rotates) < config.num_layers:
        raise ModelRefused(config.name, "its no_rope_layers are fewer than its layers")


def _decoder_config(name: str, config: Config, generation: Config, family: Family) -> DecoderConfig:
    if not _LAYER_TYPES.issuperset(config.get("layer_types") or ()):
        raise ModelRefused(name, "it has layers other than full and sliding attention")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelRefused(name, "its activation is not silu")

    def decide(flag: bool | str) -> bool:  # noqa: FBT001  # a field name or the answer itself
        return bool(config.get(flag, False)) if isinstance(flag, str) else flag

    num_heads, head_dim = config["num_attention_heads"], _head_dim(config)
    return DecoderConfig(
        name=name,
        vocab_size=config["vocab_size"],
        context_tokens=_context_tokens(config),
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        norm_eps=float(config["rms_norm_eps"]),
        rope=read_rope(name, config, family.rope, head_dim),
        windows=_windows(name, config, family),
        rotates=_rotates(config, family),
        joins_weights=family.joins_weights,
        has_qkv_bias=decide(family.qkv_bias),
        has_out_bias=decide(family.out_bias),
        has_mlp_bias=decide(family.mlp_bias),
        has_qk_norm=family.qk_norm,
        ties_head=config.get("tie_word_embeddings"),
        eos_token_ids=token_ids_of(config.get("eos_token_id"))
        | token_ids_of(generation.get("eos_token_id")),
    )


def _context_tokens(config: Config) -> int:
    told: int = config["max_position_embeddings"]
    return exact_context(config) or told


def _head_dim(config: Config) -> int:
    if config.get("head_dim"):
        return int(config["head_dim"])
    if config["model_type"] == "qwen3":  # its default is a number of its own
        raise KeyError("head_dim")
    head_dim, rest = divmod(config["hidden_size"], config["num_attention_heads"])
    if rest:
        raise ValueError(
            "hidden_size is no multiple of num_attention_heads, and there is no head_dim"
        )
    return int(head_dim)


def _windows(name: str, config: Config, family: Family) -> tuple[int, ...]:
    num_layers = int(config["num_hidden_layers"])
    kinds = config.get("layer_types") or ()
    is_used = family.window == "all" or (
        family.window == "typed" and bool(config.get("use_sliding_window"))
    )
    window = config.get("sliding_window", family.default_window) if is_used else None
    if window is None:
        if "sliding_attention" in kinds:
            raise ModelRefused(name, "its layer_types have sliding attention, other fields do not")
        return (0,) * num_layers
    if int(window) < 1:
        raise ModelRefused(name, f"its sliding window has {window} tokens")
    if family.window == "all":
        return (int(window),) * num_layers
    if len(kinds) != num_layers:
        raise ModelRefused(name, "it does not say which layers have its sliding window")
    return tuple(int(window) if kind == "sliding_attention" else 0 for kind in kinds)


def _rotates(config: Config, family: Family) -> tuple[bool, ...]:
    num_layers = int(config["num_hidden_layers"])
    if not family.skips_rope:
        return (True,) * num_layers
    flags = config.get("no_rope_layers")  # 1 where there is rope, whatever the name says
    if flags is None:
        interval = int(config.get("no_rope_layer_interval", 4))
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    return tuple(bool(flag) for flag in flags)
