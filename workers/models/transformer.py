"""The decoder of the known families over a paged pool of keys and values.

It is made of the operators of one form (workers/kernels). Products run in the form's type; the
residual stream, norms, rotations and logits are float32 whatever that is (with bfloat16 weights
this halves the error against a float32 run).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from workers.kernels.operators import (
    AttentionShape,
    GatedLinear,
    Linear,
    Operators,
    PagedAttention,
    RmsNorm,
    StepPlan,
)
from workers.models.activations import ActivationBuffers, Activations, Ends
from workers.models.errors import ModelRefused
from workers.models.families import DecoderConfig
from workers.models.rope import RopeTable
from workers.models.weights import WeightFiles

_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer. Rows of `qkv` are all query heads, all key heads, all value heads."""

    attention_norm: RmsNorm
    qkv: Linear
    attention: AttentionShape
    attention_out: Linear
    mlp_norm: RmsNorm
    gate_up: GatedLinear
    down: Linear


class Decoder:
    """The whole model, without its KV."""

    def __init__(self, directory: Path, config: DecoderConfig, operators: Operators) -> None:
        """Read all weights.

        Raises:
            ModelFilesMissing: a file or a weight is missing.
            ModelRefused: the weights do not fit the config, or some have no place here.
        """
        self._operators = operators
        self._rope = RopeTable(config.rope, config.head_dim, operators.device)
        self._buffers = ActivationBuffers(config, operators.dtype, operators.device)
        self._num_binds = 0
        files = WeightFiles(directory)
        reader = _LayerReader(files, config, operators, self._rope.num_rotated)
        table = (config.vocab_size, config.hidden_size)
        embedding = files.take("model.embed_tokens.weight", operators.dtype, table)
        head = _read_head(files, config, embedding)
        embedding = embedding.to(operators.device)  # once, also where the head is the same
        self._embedding = operators.embedding(embedding)
        self._layers = [reader.read(number) for number in range(config.num_layers)]
        norm = files.take("model.norm.weight", torch.float32, (config.hidden_size,))
        self._norm = operators.rms_norm(norm, config.norm_eps)
        self._head = operators.head(embedding if head is None else head)
        files.refuse_leftovers("rotary_emb.inv_freq")

    def rope(self, num_positions: int) -> torch.Tensor:
        """The rotations of the positions up to there, for a `StepPlan`."""
        return self._rope.up_to(num_positions)

    def reserve(self, num_rows: int) -> None:
        """Make room for steps of so many rows, so that none has to allocate."""
        self._buffers.rows(num_rows)

    def bind(self, pool: torch.Tensor) -> list[PagedAttention]:
        """Each layer's attention over its share of the pool.

        `pool`: (num_blocks, num_layers, 2, block_tokens, kv_heads, head_dim), of operators.dtype.
        """
        self._num_binds += 1
        return [
            self._operators.attention(layer.attention, pool[:, number, 0], pool[:, number, 1])
            for number, layer in enumerate(self._layers)
        ]

    def forward(
        self,
        token_ids: torch.Tensor,
        logit_rows: torch.Tensor,
        attentions: list[PagedAttention],
        plan: StepPlan,
    ) -> torch.Tensor:
        """Logits, float32 (R, vocab_size), of the wanted rows of a packed step of T tokens.

        They lie in a buffer that the next call writes again. `plan` is a staged one.
        """
        state = self._buffers.rows(len(plan.positions))
        device = self._operators.device
        num_tokens, last = len(token_ids), self._layers[-1]
        # Where few logits are wanted, as of a prompt, the last layer needs the other rows' KV alone.
        ends_early = 2 * len(logit_rows) <= num_tokens

        def run_layers() -> None:
            for layer, attention in zip(self._layers, attentions, strict=True):
                _attend(layer, attention, plan, state)
                if layer is not last or not ends_early:
                    _finish(layer, state)

        self._embedding(token_ids.to(device, non_blocking=True), state.stream[:num_tokens])
        memory = (self._buffers.generation, self._num_binds)
        name = "to the last attention" if ends_early else "all"
        self._operators.replay(memory, name, plan, run_layers)
        ends = self._buffers.ends(len(logit_rows))
        rows = logit_rows.to(device, non_blocking=True)
        torch.index_select(state.stream, 0, rows, out=ends.stream)
        if ends_early:
            torch.index_select(state.merged, 0, rows, out=ends.merged)
            _finish(last, ends)
        self._norm(ends.stream, ends.normed)
        self._head(ends.normed, ends.logits)
        return ends.logits


def _read_head(
    files: WeightFiles, config: DecoderConfig, embedding: torch.Tensor
) -> torch.Tensor | None:
    """The head's weight, None if it is the embedding.

    Raises:
        ModelRefused: the config ties them, and the files hold a head that is another.
    """
    if not config.ties_head and (config.ties_head is False or _HEAD in files):
        return files.take(_HEAD, embedding.dtype, tuple(embedding.shape))
    if _HEAD in files and not torch.equal(
        files.take(_HEAD, embedding.dtype, tuple(embedding.shape)), embedding
    ):
        raise ModelRefused(
            config.name, "its config ties the head to the embedding, its files do not"
        )
    return None


def _attend(
    layer: DecoderLayer, attention: PagedAttention, plan: StepPlan, state: Activations
) -> None:
    layer.attention_norm(state.stream, state.normed)
    layer.qkv(state.normed, state.qkv)
    attention.rotate_and_store(plan, state.qkv, state.queries)
    attention.attend_prefill(plan, state.queries, state.attended)
    attention.attend_decode(plan, state.queries, state.attended)


def _finish(layer: DecoderLayer, rows: Activations | Ends) -> None:
    """What follows the attention: each row for itself."""
    layer.attention_out.add_to(rows.merged, rows.stream)
    layer.mlp_norm(rows.stream, rows.normed)
    layer.gate_up(rows.normed, rows.gated)
    layer.down.add_to(rows.gated, rows.stream)


class _LayerReader:
    """Reads layers, joining what the files hold apart."""

    def __init__(
        self, files: WeightFiles, config: DecoderConfig, operators: Operators, num_rotated: int
    ) -> None:
        self._files = files
        self._config = config
        self._operators = operators
        self._num_rotated = num_rotated

    def read(self, number: int) -> DecoderLayer:
        """Layer `number`, from 0."""
        config, operators = self._config, self._operators
        prefix = f"model.layers.{number}."
        hidden, middle, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv_heads = config.num_heads * head_dim, config.num_kv_heads * head_dim
        qkv_names = [f"{name}_proj" for name in (("qkv",) if config.joins_weights else "qkv")]
        mlp_names = ["gate_up_proj"] if config.joins_weights else ["gate_proj", "up_proj"]
        qkv_sizes, mlp_sizes = [heads, kv_heads, kv_heads], [middle, middle]
        if config.joins_weights:
            qkv_sizes, mlp_sizes = [sum(qkv_sizes)], [sum(mlp_sizes)]
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return DecoderLayer(
            attention_norm=self._norm(f"{prefix}input_layernorm", hidden),
            qkv=operators.linear(
                *self._rows(
                    [attention + name for name in qkv_names],
                    qkv_sizes,
                    hidden,
                    has_bias=config.has_qkv_bias,
                )
            ),
            attention=self._shape(number, attention),
            attention_out=operators.linear(
                *self._rows([f"{attention}o_proj"], [hidden], heads, has_bias=config.has_out_bias)
            ),
            mlp_norm=self._norm(f"{prefix}post_attention_layernorm", hidden),
            gate_up=operators.gated_linear(
                *self._rows(
                    [mlp + name for name in mlp_names],
                    mlp_sizes,
                    hidden,
                    has_bias=config.has_mlp_bias,
                )
            ),
            down=operators.linear(
                *self._rows([f"{mlp}down_proj"], [hidden], middle, has_bias=config.has_mlp_bias)
            ),
        )

    def _shape(self, number: int, prefix: str) -> AttentionShape:
        config = self._config
        return AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            num_rotated=self._num_rotated if config.rotates[number] else 0,
            window=config.windows[number],
            query_norm=self._head_norm(f"{prefix}q_norm"),
            key_norm=self._head_norm(f"{prefix}k_norm"),
            norm_eps=config.norm_eps,
        )

    def _head_norm(self, name: str) -> torch.Tensor | None:
        if not self._config.has_qk_norm:
            return None
        return self._files.take(f"{name}.weight", torch.float32, (self._config.head_dim,))

    def _norm(self, name: str, size: int) -> RmsNorm:
        weight = self._files.take(f"{name}.weight", torch.float32, (size,))
        return self._operators.rms_norm(weight, self._config.norm_eps)

    def _rows(
        self, names: list[str], sizes: list[int], num_inputs: int, *, has_bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of several products of the same inputs, one after the other."""
        dtype = self._operators.dtype
        weights, biases = ([f"{name}.{kind}" for name in names] for kind in ("weight", "bias"))
        weight = self._files.take_rows(weights, dtype, [(size, num_inputs) for size in sizes])
        if not has_bias:
            return weight, None
        return weight, self._files.take_rows(biases, dtype, [(size,) for size in sizes])
