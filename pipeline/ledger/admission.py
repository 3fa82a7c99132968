"""How much may wait, and for whom: what `submit.lua` checks before it takes a request in."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.errors import FullWhat, Overloaded

MIN_RETRY_S, MAX_RETRY_S = 1, 60
UNKNOWN_RETRY_S = 5


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Limits that all gateways share; 0 is none.

    max_waiting: requests beyond the places of all decoding workers. max_waiting_tokens: prompt tokens
    that are accepted and not computed. max_open_per_tenant and max_open_per_model: requests that wait
    or run.
    """

    max_waiting: int
    max_waiting_tokens: int = 0
    max_open_per_tenant: int = 0
    max_open_per_model: int = 0


@dataclass(frozen=True, slots=True)
class TokenDeadlines:
    """Limits of the time to the first token and between tokens, in seconds; 0 is none."""

    first_token_s: float = 0.0
    token_gap_s: float = 0.0


NO_TOKEN_DEADLINES = TokenDeadlines()


def refusal(
    what: FullWhat, predicted_wait_ms: int, count: int, queue_deadline_s: float
) -> Overloaded:
    """The error for what `submit.lua` found full, with a time after which a retry makes sense.

    What waits too long is asked back when the wait fits the deadline again; the rest when half the
    line is served.
    """
    wait_s = predicted_wait_ms / 1000
    retry_s = wait_s - queue_deadline_s if what is FullWhat.DEADLINE else wait_s / 2
    if predicted_wait_ms == 0:
        retry_s = UNKNOWN_RETRY_S
    return Overloaded(what, count, min(max(math.ceil(retry_s), MIN_RETRY_S), MAX_RETRY_S))
