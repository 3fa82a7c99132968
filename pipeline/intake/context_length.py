"""How long a context a model directory's config allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# How families call the length of a context; the first is the usual name.
CONTEXT_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "model_max_length",
    "max_seq_len",
    "context_length",
)
_ORIGINAL = "original_max_position_embeddings"
_LONG_ROPES = {"longrope", "su"}  # `su` in the first configs of Phi-3


def told_context(config: Mapping[str, Any]) -> int | None:
    """Tokens of the context that a config.json names; None if it names none."""
    told = (config.get(name) for name in CONTEXT_FIELDS)
    return next((value for value in told if isinstance(value, int)), None)


def exact_context(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest context that is computed as the model was trained; None if none is named.

    LongRoPE (Ding et al., 2024) turns by one set of angles up to the original context and by another,
    from the first token on, beyond it: keys of a context that grows past that would be of the wrong
    set, and blocks of them of no use to other requests. So the original context is the longest.
    """
    told = told_context(config)
    if told is None:
        return None
    originals = (rope.get(_ORIGINAL, config.get(_ORIGINAL)) for rope in _long_ropes(config))
    return min([told, *(value for value in originals if isinstance(value, int))])


def is_long_rope(rope: Mapping[str, Any]) -> bool:
    """Its angles depend on whether the context is longer than the original one."""
    return rope.get("rope_type", rope.get("type")) in _LONG_ROPES


def _long_ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rope of all layers, or those of each kind of layer."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(rope, dict):
        of_layers = (own for own in rope.values() if isinstance(own, dict))
        yield from (each for each in (rope, *of_layers) if is_long_rope(each))
