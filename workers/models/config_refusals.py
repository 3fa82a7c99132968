"""What a model directory asks for that nothing here computes, and that would be wrong in silence.

Libraries pass over config fields that a model class does not know. A field that changes what a model
computes must be one that somebody reads, or the model is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from workers.models.errors import ModelFilesMissing, ModelRefused

Config = Mapping[str, Any]

# Fields by which decoders differ from the plain one; 1 is neutral for those that multiply or count.
_TELLING = (
    "alibi",
    "attention_chunk_size",
    "attention_in_multiplier",
    "attention_multiplier",
    "attention_out_multiplier",
    "attention_value_scale",
    "attn_logit_softcapping",
    "attn_temperature_tuning",
    "clip_qkv",
    "dim_model_base",
    "embedding_multiplier",
    "embedding_scale",
    "final_logit_softcapping",
    "global_attn_every_n_layers",
    "key_multiplier",
    "kv_lora_rank",
    "lm_head_multiplier",
    "logit_scale",
    "logits_scaling",
    "logits_soft_cap",
    "mup_enabled",
    "n_routed_experts",
    "no_rope_layers",
    "num_experts",
    "num_kv_shared_layers",
    "num_local_experts",
    "parallel_attn",
    "qk_layernorm",
    "query_pre_attn_scalar",
    "residual_multiplier",
    "rope_interleave",
    "scale_attn_by_inverse_layer_idx",
    "scale_depth",
    "scale_emb",
    "scale_embedding",
    "swiglu_limit",
    "use_alibi",
    "use_bidirectional_attention",
    "use_parallel_residual",
    "use_post_norm",
    "use_qk_norm",
)

# Each says in words what is asked for; the first that holds is the reason.
_REFUSALS: tuple[tuple[str, Callable[[Config], bool]], ...] = (
    ("it has an encoder", lambda config: bool(config.get("is_encoder_decoder"))),
    (
        "it is no causal language model",
        lambda config: (
            config.get("is_causal") is False
            or not all(
                str(name).endswith(("ForCausalLM", "LMHeadModel"))
                for name in config.get("architectures") or ()
            )
        ),
    ),
    (
        "its weights are quantised",
        lambda config: bool(config.get("quantization_config") or config.get("compression_config")),
    ),
)


def read_json(path: Path) -> Config:
    """A JSON object.

    Raises:
        ModelFilesMissing: there is no such file.
        ModelRefused: it holds something else.
    """
    if not path.is_file():
        raise ModelFilesMissing(str(path.parent), path.name)
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelRefused(path.parent.name, f"its {path.name} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelRefused(path.parent.name, f"its {path.name} is no JSON object")
    return content


def refuse_untold(
    directory: Path, config: Config, known: Container[str], architecture: str
) -> None:
    """Refuse a directory whose config asks for more than its family is.

    `known`: fields that whoever computes the model reads. `architecture`: the class whose
    computation that is; compared without case, since old files write LLaMA.

    Raises:
        ModelRefused: so it is.
    """
    reason = next((words for words, holds in _REFUSALS if holds(config)), None)
    if (directory / "adapter_config.json").is_file():
        reason = "it holds an adapter: merge that into the weights"
    architectures = [str(each) for each in config.get("architectures") or (architecture,)]
    if reason is None and architecture.lower() not in map(str.lower, architectures):
        reason = f"its architecture is {architectures[0]}, not {architecture}"
    untold = next(_untold(config, known), None)
    if reason is None and untold is not None:
        reason = f"its config has {untold}, which {architecture} does not know"
    if reason is not None:
        raise ModelRefused(directory.name, reason)


def _untold(config: Config, known: Container[str]) -> Iterator[str]:
    """What the config asks for that nobody reads."""
    for field in _TELLING:
        if field not in known and _is_active(config.get(field)):
            yield field
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if "layer_types" not in known and isinstance(rope, dict):
        yield from (f"a rope for {key}" for key, own in rope.items() if isinstance(own, dict))
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    is_used = config.get("use_sliding_window") is not False
    if "sliding_window" not in known and window and is_used and window < (context or window + 1):
        yield "sliding_window"


def _is_active(value: object) -> bool:
    return value is True or (value is not False and value not in (None, 0, 1, [], {}))
