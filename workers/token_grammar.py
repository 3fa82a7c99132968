"""The port through which the engine learns which tokens a grammar lets follow, and its masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from workers.model import Float32Array

_LEAST_LOGIT = np.float32(-1e30)  # finite: what a grammar allows is never impossible
_IMPOSSIBLE = np.float32(-np.inf)


class TokenGrammar(Protocol):
    """Where one sequence stands in its grammar; a failure ends this sequence and no other.

    It comes at the place that the sequence's logged tokens have led to. Called on the engine thread.
    """

    @property
    def allowed(self) -> bytes:
        """A bit per token id, lowest first: set where the token may follow; at least one is."""
        ...

    @property
    def is_complete(self) -> bool:
        """True when nothing but the end may follow."""
        ...

    def take(self, token_id: int) -> None:
        """Move on by one token that was allowed."""
        ...


class MaskedLogits:
    """Rows of `logits` (R, vocab_size) without the tokens that their grammars forbid.

    masks: (row, bits) as in `TokenGrammar.allowed`; `kept` are the rows whose raw logits come back
    with `undo`. An allowed token's logit is finite even where the model, or another rule of the
    request, says never: the grammar has the last word.
    """

    def __init__(
        self, logits: Float32Array, masks: Sequence[tuple[int, bytes]], kept: Sequence[int]
    ) -> None:
        self._logits = logits
        self._kept = list(kept)
        self._before = logits[self._kept]
        for number, bits in masks:
            _forbid(logits[number], bits)

    def undo(self) -> None:
        """Put the raw logits back where somebody wants to see them."""
        self._logits[self._kept] = self._before


def _forbid(row: Float32Array, bits: bytes) -> None:
    packed = np.frombuffer(bits, dtype=np.uint8)
    is_forbidden = np.unpackbits(~packed, count=len(row), bitorder="little").view(bool)
    np.copyto(row, _IMPOSSIBLE, where=is_forbidden)
    if not np.isfinite(row.max()):  # NaN, or nothing left: rare, and dear to look for one by one
        np.fmax(row, _LEAST_LOGIT, out=row, where=~is_forbidden)
