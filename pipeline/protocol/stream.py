"""What a follower of a request sees: tokens as they come, the ending, the state in between."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.protocol.cache_use import CacheUse
from pipeline.protocol.failure import Ending
from pipeline.protocol.request import RequestState
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.tokens import TokenRecord


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """Token counts of one request.

    `cached_tokens` of the `prompt_tokens` were not computed by prefill.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of all prompt tokens but the first; before any token of the output.

    Only in streams of requests that score their prompt.
    """

    records: list[TokenRecord]


@dataclass(frozen=True, slots=True)
class TokensArrived:
    """Output tokens `index`, `index + 1`, ... in order; at least one."""

    index: int
    records: list[TokenRecord]


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The last event of every stream; nothing follows it."""

    ending: Ending
    usage: RequestUsage


StreamEvent = PromptScored | TokensArrived | StreamEnded


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When a request came to which point, on the store's clock (Unix seconds); None: not yet, or never.

    `claimed`: by its first worker. `handed`, `resumed`: left and taken up in a hand-over.
    """

    created_s: float
    claimed_s: float | None = None
    first_token_s: float | None = None
    handed_s: float | None = None
    resumed_s: float | None = None
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """A request as the ledger knows it now. `workers`: all that had it, in order.

    cache_use: of the worker that began the answer. resumed_use: of the last one that took it up again,
    after a hand-over or from a lost worker; its tokens are all that were known, not only the prompt's.
    """

    request_id: str
    state: RequestState
    model: str
    tenant: str
    sampling: SamplingParams
    usage: RequestUsage
    ending: Ending | None
    node: str
    attempt: int
    times: RequestTimes
    workers: tuple[str, ...] = ()
    body_digest: str = ""
    cache_use: CacheUse | None = None
    resumed_use: CacheUse | None = None
