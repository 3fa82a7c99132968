"""A request: what the gateway asks of the pipeline, complete and tokenized."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from pipeline.protocol.sampling import SamplingParams

TOKEN_BYTES = 4


class Priority(IntEnum):
    """Celery's priority steps on Redis; 0 is served first."""

    HIGH = 0
    NORMAL = 3
    LOW = 6
    BATCH = 9


class RequestState(StrEnum):
    """Where a request stands in the ledger.

    QUEUED waits for a worker (also between prefill and decode); RUNNING is owned by one worker;
    the last three are final.
    """

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """True once nothing will change any more."""
        return self in (RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED)


@dataclass(frozen=True, slots=True)
class JobTerms:
    """What a request carries that outlives its client's connection.

    `body_digest` tells a repeated submission from another one under the same id. `is_listed`: it
    stands in its tenant's list of jobs. `webhook`: whom to tell of its end, as JSON of a `Webhook`.
    `card`: what the gateway shows again with the answer, JSON of its own.
    """

    body_digest: str = ""
    is_listed: bool = False
    webhook: str = ""
    card: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate.

    `prompt_tokens` are token ids below the model's vocabulary size, at least one. `tenant_salt` is
    derived from the authenticated key, never from the body; it enters the key of every KV block.
    `job` is None where the answer belongs to one connection. Deadlines are durations in seconds,
    counted on the store's clock from submission.
    """

    request_id: str
    model: str
    prompt_tokens: Sequence[int]
    sampling: SamplingParams
    priority: Priority = Priority.NORMAL
    tenant: str = "default"
    tenant_salt: str = ""
    queue_deadline_s: float = 60.0
    total_deadline_s: float = 600.0
    job: JobTerms | None = None


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as u32 in native (little-endian) order, 4 bytes each."""
    return array("I", token_ids).tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of `pack_tokens`; a trailing partial id is dropped."""
    ids = array("I")
    ids.frombytes(data[: len(data) // TOKEN_BYTES * TOKEN_BYTES])
    return ids.tolist()
