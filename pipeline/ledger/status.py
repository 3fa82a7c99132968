"""A request's hash as its status."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import ValidationError

from pipeline.protocol.cache_use import CacheUse
from pipeline.protocol.failure import Ending
from pipeline.protocol.request import RequestState
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.stream import RequestStatus, RequestTimes, RequestUsage
from pipeline.protocol.tokens import record_bytes

_TIME_FIELDS = {
    "created_s": "created_ms",
    "claimed_s": "claimed_ms",
    "first_token_s": "first_ms",
    "handed_s": "handed_ms",
    "resumed_s": "resumed_ms",
    "ended_s": "ended_ms",
}
STATUS_FIELDS = (
    "state", "model", "tenant", "sampling", "num_prompt", "cached", "ending", "node", "attempt",
    "workers", "body_digest", "cache_use", "resumed_use",
    *_TIME_FIELDS.values(),
)  # fmt: skip


def read_status(
    request_id: str, values: Sequence[bytes | None], log_bytes: int
) -> RequestStatus | None:
    """The status in the values of `STATUS_FIELDS` and the length of the token log; None: no request."""
    if values[0] is None:
        return None
    fields = {
        name: (value or b"").decode() for name, value in zip(STATUS_FIELDS, values, strict=True)
    }
    sampling = _read_sampling(fields["sampling"])
    times = {
        name: int(fields[field]) / 1000 for name, field in _TIME_FIELDS.items() if fields[field]
    }
    return RequestStatus(
        request_id=request_id,
        state=RequestState(fields["state"]),
        model=fields["model"],
        tenant=fields["tenant"],
        sampling=sampling,
        usage=RequestUsage(
            prompt_tokens=int(fields["num_prompt"]),
            completion_tokens=log_bytes // record_bytes(sampling.num_logprobs),
            cached_tokens=int(fields["cached"] or 0),
        ),
        ending=Ending.decode(fields["ending"]) if fields["ending"] else None,
        node=fields["node"],
        attempt=int(fields["attempt"]),
        times=RequestTimes(**times),
        workers=tuple(fields["workers"].split()),
        body_digest=fields["body_digest"],
        cache_use=read_cache_use(fields["cache_use"]),
        resumed_use=read_cache_use(fields["resumed_use"]),
    )


def _read_sampling(text: str) -> SamplingParams:
    """Parameters, to be shown: of a newer build's those that we know.

    Raises:
        ValidationError: one of those makes no sense.
    """
    try:
        return SamplingParams.model_validate_json(text)
    except ValidationError:
        fields = json.loads(text).items()
        known = {name: value for name, value in fields if name in SamplingParams.model_fields}
        return SamplingParams.model_validate(known)


def read_cache_use(value: str | bytes) -> CacheUse | None:
    """What the field `cache_use` says; None if it is empty, or of a build whose words we do not know."""
    try:
        return CacheUse.model_validate_json(value) if value else None
    except ValidationError:
        return None
