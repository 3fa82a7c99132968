"""Rotary position embedding (Su et al., 2021), with the stretchings that the families use."""

from __future__ import annotations

import math

import torch

from workers.models.families import RopeConfig


class Rope:
    """Angles of a step's positions, and the rotation of its queries and keys.

    The angles are computed for each step: a table for every position of a long context would be
    larger than the work it saves.
    """

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        """Inverse frequencies, float32 (head_dim / 2)."""
        powers = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        self._inverse_frequencies = _stretch(1.0 / (config.theta**powers), config)
        self._half = head_dim // 2

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, float32 (T, 1, head_dim), for `rotate`."""
        angles = positions.float()[:, None] * self._inverse_frequencies
        cosines, sines = angles.cos(), angles.sin()
        return (
            torch.cat((cosines, cosines), dim=1)[:, None],
            torch.cat((-sines, sines), dim=1)[:, None],
        )

    def rotate(self, heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Rotate `heads`, float32 (T, num_heads, head_dim), in place."""
        cosines, sines = angles
        swapped = heads.roll(self._half, dims=2)
        heads.mul_(cosines).addcmul_(swapped, sines)


def _stretch(inverse: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    if config.rope_type == "linear":
        return inverse / config.factor
    if config.rope_type != "llama3":
        return inverse
    turns = config.original_context_tokens * inverse / (2 * math.pi)  # in the original context
    spread = config.high_freq_factor - config.low_freq_factor
    smooth = ((turns - config.low_freq_factor) / spread).clamp(0, 1)
    return (1 - smooth) * inverse / config.factor + smooth * inverse
