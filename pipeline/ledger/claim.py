"""What a worker gets when it claims a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pydantic import ValidationError

from pipeline.protocol.request import Priority, unpack_tokens
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.tokens import TokenRecord, unpack_records


class ClaimRefusal(StrEnum):
    """Why a message leads to no work. All of them mean: acknowledge and forget."""

    GONE = "gone"
    FINAL = "final"
    TAKEN = "taken"
    MOVED = "moved"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TailHint:
    """Where the last, partly filled block of a handed-over sequence lies.

    `attempt` made it; `num_tokens` is the number of tokens of the whole sequence it completes.
    """

    attempt: int
    num_tokens: int

    def encode(self) -> str:
        """`attempt:num_tokens`."""
        return f"{self.attempt}:{self.num_tokens}"

    @classmethod
    def decode(cls, text: str) -> TailHint | None:
        """The inverse of `encode`; None for the empty text."""
        attempt, _, num_tokens = text.partition(":")
        return cls(int(attempt), int(num_tokens)) if num_tokens else None


@dataclass(frozen=True, slots=True)
class ClaimedRequest:
    """A request that this worker owns from now on, at this attempt.

    `logged` are the output tokens that earlier owners produced; `remaining_s` is what is left of the
    total deadline. `came_from` is the worker that had it before, empty for none: its node has KV blocks.
    """

    request_id: str
    attempt: int
    prompt_tokens: list[int]
    logged: list[TokenRecord]
    sampling: SamplingParams
    priority: Priority
    tenant: str
    tenant_salt: str
    remaining_s: float
    tail: TailHint | None
    came_from: str = ""


class ClaimUnreadable(Exception):
    """The request is ours now, and says what this build does not understand: a newer gateway wrote it."""

    def __init__(self, request_id: str, attempt: int) -> None:
        super().__init__(request_id, attempt)
        self.request_id = request_id
        self.attempt = attempt

    def __str__(self) -> str:
        return f"{self.request_id} is of a newer build; update workers before gateways"


def decode_claim(request_id: str, reply: Sequence[bytes | int]) -> ClaimedRequest | ClaimRefusal:
    """Read the answer of `claim.lua`.

    Raises:
        ClaimUnreadable: its parameters are of another build.
    """
    status = _text(reply[0])
    if status != "run":
        return ClaimRefusal(status)
    _, attempt, prompt, log, remaining_ms, sampling_json, priority, tenant, salt, *last = reply
    _, tail, came_from = last
    try:
        sampling = SamplingParams.model_validate_json(_raw(sampling_json))
    except ValidationError as error:
        raise ClaimUnreadable(request_id, int(attempt)) from error
    return ClaimedRequest(
        request_id=request_id,
        attempt=int(attempt),
        prompt_tokens=unpack_tokens(_raw(prompt)),
        logged=list(unpack_records(_raw(log), sampling.num_logprobs)),
        sampling=sampling,
        priority=Priority(int(priority)),
        tenant=_text(tenant),
        tenant_salt=_text(salt),
        remaining_s=int(remaining_ms) / 1000,
        tail=TailHint.decode(_text(tail)),
        came_from=_text(came_from),
    )


def _raw(value: bytes | int) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _text(value: bytes | int) -> str:
    return _raw(value).decode()
