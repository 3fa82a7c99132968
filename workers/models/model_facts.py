"""What an engine tells the rest of the worker of a model, whoever computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`product_widths`: inputs of the matrix products that our operators compute, none if others do."""

    name: str
    vocab_size: int
    context_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    eos_token_ids: frozenset[int]
    product_widths: tuple[int, ...] = ()


def token_ids_of(value: Any) -> frozenset[int]:
    """A config's field that holds none, one or several token ids."""
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])
