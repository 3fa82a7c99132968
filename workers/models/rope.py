"""Rotary position embedding (Su et al., 2021), with the stretchings that the families use."""

from __future__ import annotations

import math

import torch

from workers.models.rope_config import RopeConfig

_PIECE_TOKENS = 1024


class RopeTable:
    """Cosines and sines of all positions up to the furthest that was asked for.

    Computed in pieces of a fixed size, so that an angle never depends on who asked first.
    """

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        self.num_rotated = int(head_dim * config.partial)
        powers = torch.arange(0, self.num_rotated, 2, dtype=torch.int64).float() / self.num_rotated
        self._frequencies = _frequencies(config.theta**powers, config)
        self._scale = config.attention_factor
        self._table = torch.empty((0, self.num_rotated), device=device)

    def up_to(self, num_positions: int) -> torch.Tensor:
        """float32 (at least num_positions, num_rotated), cosines then sines of each position."""
        if num_positions <= len(self._table):
            return self._table
        wanted = max(num_positions, 2 * len(self._table))
        firsts = range(len(self._table), wanted, _PIECE_TOKENS)
        pieces = [self._piece(first).to(self._table.device) for first in firsts]
        self._table = torch.cat((self._table, *pieces))
        return self._table

    def _piece(self, first: int) -> torch.Tensor:
        positions = torch.arange(first, first + _PIECE_TOKENS).float()
        angles = positions[:, None] * self._frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=1) * self._scale


def _frequencies(periods: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    if config.rope_type == "longrope":
        return 1.0 / (torch.tensor(config.short_factors) * periods)
    inverse = 1.0 / periods
    if config.rope_type == "linear":
        return inverse / config.factor
    if config.rope_type == "llama3":
        turns = config.original_context_tokens * inverse / (2 * math.pi)  # in the original context
        spread = config.high_freq_factor - config.low_freq_factor
        smooth = ((turns - config.low_freq_factor) / spread).clamp(0, 1)
        return (1 - smooth) * inverse / config.factor + smooth * inverse
    if config.rope_type == "yarn":
        smooth = 1 - _yarn_ramp(config, len(inverse))
        return inverse / config.factor * (1 - smooth) + inverse * smooth
    return inverse


def _yarn_ramp(config: RopeConfig, num_frequencies: int) -> torch.Tensor:
    """0 for the frequencies that stay as they are, 1 for those that are stretched whole."""
    width = 2 * num_frequencies

    def place_of(num_turns: float) -> float:
        """Where the frequency lies that turns so often in the original context."""
        turns = config.original_context_tokens / (num_turns * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(config.theta))

    low, high = place_of(config.beta_fast), place_of(config.beta_slow)
    if config.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(num_frequencies).float() - low) / (high - low)).clamp(0, 1)
