"""Guessing the next tokens from the sequence's own text.

Prompt lookup decoding (Saxena 2023): what followed the last time the newest tokens stood in the
prompt or the output, is likely to follow again. The guesses are checked in the next step, all in
one; each that holds saves a step.
"""

from __future__ import annotations

from collections.abc import Sequence

MATCH_TOKENS = (4, 3, 2)  # how much of the end must have stood there before, the longest first
_MAX_PAUSE_STEPS = 32


class PromptLookup:
    """Drafts for one sequence. `tokens` is the sequence's own list, which grows.

    Guesses get shorter where they fail and rest where they fail again and again, so that text
    without repetition runs as fast as without guessing.
    """

    def __init__(self, tokens: Sequence[int], max_drafts: int, context_tokens: int) -> None:
        self._tokens = tokens
        self._max_drafts = max_drafts
        self._context_tokens = context_tokens
        self._follows: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0
        self._width = max_drafts
        self._num_failed_in_row = 0
        self._num_pausing = 0

    def propose(self, limit: int) -> tuple[int, ...]:
        """At most `limit` guesses of the tokens that follow; the context has room for them."""
        if self._num_pausing:
            self._num_pausing -= 1
            return ()
        self._index()
        tokens = self._tokens
        limit = min(limit, self._width, self._context_tokens - len(tokens))
        for num_matching in MATCH_TOKENS if limit > 0 else ():
            start = self._follows.get(tuple(tokens[-num_matching:]))
            if start is not None and len(tokens) >= num_matching:
                return _continued(tokens, start, limit)
        return ()

    def learn(self, num_drafts: int, num_held: int) -> None:
        """How the last guesses did."""
        if num_held == num_drafts:
            self._width = min(self._max_drafts, 2 * self._width)
        else:
            self._width = max(1, num_held)
        self._num_failed_in_row = 0 if num_held else self._num_failed_in_row + 1
        if self._num_failed_in_row > 1:
            self._num_pausing = min(2**self._num_failed_in_row, _MAX_PAUSE_STEPS)

    def _index(self) -> None:
        """Note what follows each run of tokens that has a follower."""
        tokens = self._tokens
        for place in range(max(self._num_indexed, min(MATCH_TOKENS)), len(tokens)):
            for num_matching in MATCH_TOKENS:
                if num_matching <= place:
                    self._follows[tuple(tokens[place - num_matching : place])] = place
        self._num_indexed = len(tokens)


def _continued(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """The tokens from `start` on; at their end a repetition goes on as it did."""
    known = tokens[start : start + count]
    return tuple(known[place % len(known)] for place in range(count))
