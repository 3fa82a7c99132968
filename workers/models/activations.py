"""The tensors that a step passes from operator to operator, kept from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.models.families import DecoderConfig

_MAX_KEPT_LOGITS = 128


@dataclass(frozen=True, slots=True)
class Activations:
    """Buffers of T rows. `stream`, `qkv` are float32, the others in the operators' type.

    stream, normed (T, hidden); qkv (T, heads + 2 * kv_heads, head_dim); queries, attended
    (T, heads, head_dim); gated (T, intermediate).
    """

    stream: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    queries: torch.Tensor
    attended: torch.Tensor
    gated: torch.Tensor

    @property
    def merged(self) -> torch.Tensor:
        """`attended` as (T, heads * head_dim)."""
        return self.attended.flatten(1)


@dataclass(frozen=True, slots=True)
class Ends:
    """Buffers of the R rows whose logits are wanted.

    stream float32 (R, hidden); normed (R, hidden), merged (R, heads * head_dim) and gated
    (R, intermediate) in the operators' type; logits float32 (R, vocab_size).
    """

    stream: torch.Tensor
    normed: torch.Tensor
    merged: torch.Tensor
    gated: torch.Tensor
    logits: torch.Tensor

    def first(self, num_rows: int) -> Ends:
        """The same memory, of fewer rows."""
        return Ends(
            self.stream[:num_rows],
            self.normed[:num_rows],
            self.merged[:num_rows],
            self.gated[:num_rows],
            self.logits[:num_rows],
        )


class ActivationBuffers:
    """Grows to the largest step and then allocates nothing."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self.generation = 0  # counts the times that the rows' memory moved
        self._whole = self._make(0)
        self._views = self._whole
        self._ends = self._make_ends(0)

    def rows(self, num_rows: int) -> Activations:
        """Buffers of this many rows; their content is that of any earlier step."""
        if num_rows > len(self._whole.stream):
            self._whole = self._make(num_rows)
            self.generation += 1
        if num_rows != len(self._views.stream):
            whole = self._whole
            self._views = Activations(
                whole.stream[:num_rows],
                whole.normed[:num_rows],
                whole.qkv[:num_rows],
                whole.queries[:num_rows],
                whole.attended[:num_rows],
                whole.gated[:num_rows],
            )
        return self._views

    def ends(self, num_rows: int) -> Ends:
        """Buffers of this many rows, the same memory each time; many rows get their own."""
        if num_rows > len(self._ends.logits):
            ends = self._make_ends(num_rows)
            if num_rows > _MAX_KEPT_LOGITS:  # a prompt is scored, which is rare
                return ends
            self._ends = ends
        return self._ends.first(num_rows)

    def _make_ends(self, num_rows: int) -> Ends:
        config = self._config

        def rows(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty((num_rows, width), dtype=dtype, device=self._device)

        return Ends(
            stream=rows(config.hidden_size, torch.float32),
            normed=rows(config.hidden_size, self._dtype),
            merged=rows(config.num_heads * config.head_dim, self._dtype),
            gated=rows(config.intermediate_size, self._dtype),
            logits=rows(config.vocab_size, torch.float32),
        )

    def _make(self, num_rows: int) -> Activations:
        config = self._config

        def rows(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty((num_rows, *shape), dtype=dtype, device=self._device)

        num_all = config.num_heads + 2 * config.num_kv_heads
        return Activations(
            stream=rows(config.hidden_size, dtype=torch.float32),
            normed=rows(config.hidden_size, dtype=self._dtype),
            qkv=rows(num_all, config.head_dim, dtype=torch.float32),
            queries=rows(config.num_heads, config.head_dim, dtype=self._dtype),
            attended=rows(config.num_heads, config.head_dim, dtype=self._dtype),
            gated=rows(config.intermediate_size, dtype=self._dtype),
        )
