"""The port through which the engine learns that a stop string is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from workers.sequence import Sequence


class StopMatcher(Protocol):
    """Watches the output of one sequence. Called on the engine thread; must be quick."""

    def feed(self, token_id: int) -> bool:
        """Take the next output token; True once a stop string is complete."""
        ...


# Answers None for a sequence without stop strings. The matcher comes fresh: the engine feeds it the
# tokens that earlier attempts logged before those of this one.
StopMatcherFactory = Callable[[Sequence], StopMatcher | None]
