"""Shape and size of one KV block."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Self

KvDtype = Literal["float32", "bfloat16", "float16", "uint8"]

_DESCRIBED = re.compile(r"L(\d+)\.T(\d+)\.H(\d+)\.D(\d+)\.(\w+)\.v1\b")
_DTYPE_BYTES: dict[KvDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Shape and size of one block, the same in every tier and on the wire.

    Shape (num_layers, 2, block_tokens, num_kv_heads, head_dim), C order, keys before values, so
    that one block is one contiguous run of bytes and a move between tiers is one copy.

    Raises:
        ValueError: a count is below one.
    """

    num_layers: int
    block_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: KvDtype

    def __post_init__(self) -> None:
        if min(self.num_layers, self.block_tokens, self.num_kv_heads, self.head_dim) < 1:
            raise ValueError(f"every count of a block layout is at least one: {self}")

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token in all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * _DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_tokens

    def describe(self) -> str:
        """One canonical line; equal lines mean interchangeable bytes."""
        return (
            f"L{self.num_layers}.T{self.block_tokens}.H{self.num_kv_heads}"
            f".D{self.head_dim}.{self.dtype}.v1"
        )

    @classmethod
    def described(cls, line: str) -> Self | None:
        """The layout of a line that `describe` wrote or that begins with one; None for others."""
        match = _DESCRIBED.match(line)
        dtype = match and next((name for name in _DTYPE_BYTES if name == match[5]), None)
        if not match or dtype is None:
            return None
        num_layers, block_tokens, num_kv_heads, head_dim = map(int, match.groups()[:4])
        try:
            return cls(num_layers, block_tokens, num_kv_heads, head_dim, dtype)
        except ValueError:
            return None
