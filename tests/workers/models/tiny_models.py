"""Configs of tiny models, one or more of each family, for random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

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
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 3.0, 5.0, 8.0, 12.0],
}
NUM_ORIGINAL = 350  # tokens
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


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
        "yarn": transformers.LlamaConfig(**TINY, rope_parameters=YARN_ROPE),
        "mistral": transformers.MistralConfig(**TINY, sliding_window=37),
        "phi3": transformers.Phi3Config(**without_head_dim, pad_token_id=0, sliding_window=90),
        "phi3-partial": transformers.Phi3Config(
            **without_head_dim, pad_token_id=0, rope_parameters=PARTIAL_ROPE
        ),
        "phi3-long": transformers.Phi3Config(
            **without_head_dim,
            pad_token_id=0,
            original_max_position_embeddings=NUM_ORIGINAL,
            rope_parameters=LONG_ROPE | {"partial_rotary_factor": 0.75},
        ),
        "qwen2": transformers.Qwen2Config(**without_head_dim),
        "qwen2-window": transformers.Qwen2Config(
            **without_head_dim, use_sliding_window=True, sliding_window=20, max_window_layers=1
        ),
        "qwen3": transformers.Qwen3Config(**TINY, tie_word_embeddings=True),
        "smollm3": transformers.SmolLM3Config(
            **TINY, pad_token_id=0, no_rope_layer_interval=2, tie_word_embeddings=True
        ),
    }


TINY_NAMES = tuple(tiny_configs())


def gguf_configs() -> dict[str, Any]:
    """What llama.cpp knows in one form only."""
    return {
        "smollm3-4": transformers.SmolLM3Config(
            **{**TINY, "num_hidden_layers": 5},
            pad_token_id=0,
            no_rope_layer_interval=4,
            tie_word_embeddings=True,
        )
    }


def modules_configs() -> dict[str, Any]:
    """Models that run over transformers' modules."""
    alternating = ["sliding_attention", "full_attention", "sliding_attention"]
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    without_head_dim = {**TINY, "hidden_size": 96}
    del without_head_dim["head_dim"]
    return {
        "gemma3": transformers.Gemma3TextConfig(
            **TINY,
            sliding_window=20,
            layer_types=alternating,
            query_pre_attn_scalar=16,
            pad_token_id=0,
        ),
        "dynamic": transformers.LlamaConfig(
            **TINY, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        ),
        "gpt2": transformers.GPT2Config(
            vocab_size=300, n_positions=512, n_embd=48, n_layer=3, n_head=3, initializer_range=0.3
        ),
        "granite": transformers.GraniteConfig(**without_head_dim, attention_multiplier=0.3),
        "mixtral": transformers.MixtralConfig(**TINY, **experts),
        "llama-gelu": transformers.LlamaConfig(**TINY, hidden_act="gelu"),
        "starcoder2": transformers.Starcoder2Config(**without_head_dim, sliding_window=20),
    }


def masked_configs() -> dict[str, tuple[Any, str]]:
    """Models whose masks hide what is far away, and tell nobody but the mask."""
    without_head_dim = {**TINY, "hidden_size": 96}
    del without_head_dim["head_dim"]
    return {
        "llama4": (
            transformers.Llama4TextConfig(
                **{**TINY, "max_position_embeddings": 20_000},
                intermediate_size_mlp=80,
                num_local_experts=2,
                attention_chunk_size=8192,
                pad_token_id=0,
            ),
            "mask is not causal",
        ),
        "qwen2-moe": (
            transformers.Qwen2MoeConfig(
                **{**without_head_dim, "max_position_embeddings": 2000},
                moe_intermediate_size=32,
                shared_expert_intermediate_size=32,
                num_experts=4,
                num_experts_per_tok=2,
                use_sliding_window=True,
                sliding_window=1000,
                max_window_layers=1,
            ),
            "mask is not causal",
        ),
    }


def refused_configs() -> dict[str, tuple[Any, str]]:
    """Models that nothing here runs exactly, and what is said of them."""
    sizes = {"vocab_size": 300, "hidden_size": 48}
    alternating = ["sliding_attention", "full_attention", "sliding_attention"]
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return masked_configs() | {
        "gemma2": (transformers.Gemma2Config(**TINY, pad_token_id=0), "a soft cap"),
        "gpt-oss": (
            transformers.GptOssConfig(
                **TINY, **experts, sliding_window=20, layer_types=alternating
            ),
            "sinks",
        ),
        "mamba": (
            transformers.MambaConfig(**sizes, num_hidden_layers=2, state_size=8),
            "no attention that could be paged",
        ),
        "bloom": (
            transformers.BloomConfig(**sizes, n_layer=2, n_head=4),
            "no attention function but their own",
        ),
        "recurrent": (
            transformers.JambaConfig(
                **{**TINY, "num_hidden_layers": 2},
                pad_token_id=0,
                attn_layer_period=2,
                attn_layer_offset=1,
                expert_layer_period=2,
                use_mamba_kernels=False,
            ),
            "more state than keys and values",
        ),
    }


def copied(directory: Path, target: Path, **changes: Any) -> Path:
    """A copy of a model with other config fields; those that are ... are taken out."""
    shutil.copytree(directory, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text()) | changes
    told = {name: value for name, value in config.items() if value is not ...}
    (target / "config.json").write_text(json.dumps(told))
    return target


def logits_of(
    directory: Path, tokens: list[int], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """What Hugging Face's own modules compute: float32 (tokens, vocab_size)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits
