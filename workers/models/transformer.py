"""The decoder of the Llama, Qwen2 and Qwen3 families, over a paged pool of keys and values.

Products run in the weights' type; the residual stream, norms, rotations and logits are float32
whatever that is (with bfloat16 weights this halves the error against a float32 run).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import embedding, rms_norm, silu

from workers.models.attention import AttentionPlan, PagedKv
from workers.models.families import DecoderConfig
from workers.models.linear import Linear
from workers.models.rope import Rope
from workers.models.weights import WeightFiles


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer. Rows of `qkv` are all query heads, all key heads, all value heads."""

    attention_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """The whole model, without its KV."""

    def __init__(self, directory: Path, config: DecoderConfig, dtype: torch.dtype) -> None:
        """Read all weights.

        Raises:
            ModelFilesMissing: a file or a weight is missing.
            ModelRefused: the weights do not fit the config, or some have no place here.
        """
        self._config = config
        self._rope = Rope(config.rope, config.head_dim)
        files = WeightFiles(directory)
        table = (config.vocab_size, config.hidden_size)
        self._embedding = files.take("model.embed_tokens.weight", dtype, table)
        self._layers = [_read_layer(files, config, n, dtype) for n in range(config.num_layers)]
        self._norm = files.take("model.norm.weight", torch.float32, (config.hidden_size,))
        ties_head = config.ties_head
        if ties_head is None:
            ties_head = "lm_head.weight" not in files
        name = "model.embed_tokens.weight" if ties_head else "lm_head.weight"
        # In float32: a bfloat16 logit near 40 is rounded to quarters, and ties decide the token.
        self._head = Linear(files.take(name, torch.float32, table))
        files.refuse_leftovers("rotary_emb.inv_freq", *(("lm_head.weight",) if ties_head else ()))

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        kv: PagedKv,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Logits, float32 (R, vocab_size), of the wanted rows of a packed step of T tokens."""
        eps = self._config.norm_eps
        width = (self._config.hidden_size,)
        angles = self._rope.angles(positions)
        stream = embedding(token_ids, self._embedding).float()
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(rms_norm(stream, width, layer.attention_norm, eps))
            queries = self._store(layer, number, qkv, angles, kv, plan)
            attended = kv.attend(plan, number, queries)
            stream += layer.attention_out(attended.flatten(1))
            gate, up = layer.gate_up(rms_norm(stream, width, layer.mlp_norm, eps)).chunk(2, dim=1)
            stream += layer.down(silu(gate) * up)
        return self._head(rms_norm(stream[logit_rows], width, self._norm, eps))

    def _store(
        self,
        layer: DecoderLayer,
        number: int,
        qkv: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        kv: PagedKv,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Store keys and values; returns the queries, (T, num_heads, head_dim)."""
        config = self._config
        num_rotated = config.num_heads + config.num_kv_heads
        heads = qkv.view(len(qkv), -1, config.head_dim)
        rotated = heads[:, :num_rotated].float()
        if layer.query_norm is not None and layer.key_norm is not None:
            width = (config.head_dim,)
            queries, keys = torch.split(rotated, [config.num_heads, config.num_kv_heads], dim=1)
            rotated = torch.cat(
                (
                    rms_norm(queries, width, layer.query_norm, config.norm_eps),
                    rms_norm(keys, width, layer.key_norm, config.norm_eps),
                ),
                dim=1,
            )
        self._rope.rotate(rotated, angles)
        if rotated.data_ptr() != heads.data_ptr():
            heads[:, :num_rotated] = rotated
        kv.store(plan, number, heads[:, config.num_heads :].flatten(1).view(len(qkv), 2, -1))
        return heads[:, : config.num_heads]


def _read_layer(
    files: WeightFiles, config: DecoderConfig, number: int, dtype: torch.dtype
) -> DecoderLayer:
    prefix = f"model.layers.{number}."
    hidden, middle, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def norm(name: str, size: int) -> torch.Tensor:
        return files.take(f"{prefix}{name}.weight", torch.float32, (size,))

    def joined(names: list[str], sizes: list[int], inputs: int, *, has_bias: bool) -> Linear:
        weights = [f"{prefix}{name}.weight" for name in names]
        biases = [f"{prefix}{name}.bias" for name in names]
        weight = files.take_rows(weights, dtype, [(size, inputs) for size in sizes])
        if not has_bias:
            return Linear(weight)
        return Linear(weight, files.take_rows(biases, dtype, [(size,) for size in sizes]))

    qkv = [f"self_attn.{name}_proj" for name in "qkv"]
    return DecoderLayer(
        attention_norm=norm("input_layernorm", hidden),
        qkv=joined(qkv, [heads, kv_heads, kv_heads], hidden, has_bias=config.has_qkv_bias),
        query_norm=norm("self_attn.q_norm", head_dim) if config.has_qk_norm else None,
        key_norm=norm("self_attn.k_norm", head_dim) if config.has_qk_norm else None,
        attention_out=joined(["self_attn.o_proj"], [hidden], heads, has_bias=config.has_out_bias),
        mlp_norm=norm("post_attention_layernorm", hidden),
        gate_up=joined(
            ["mlp.gate_proj", "mlp.up_proj"], [middle, middle], hidden, has_bias=config.has_mlp_bias
        ),
        down=joined(["mlp.down_proj"], [hidden], middle, has_bias=config.has_mlp_bias),
    )
