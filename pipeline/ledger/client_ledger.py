"""The ledger as a gateway uses it: asyncio."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from pipeline.errors import FullWhat, RequestExists
from pipeline.ledger.admission import (
    NO_TOKEN_DEADLINES,
    AdmissionLimits,
    TokenDeadlines,
    refusal,
)
from pipeline.ledger.keys import request_key, scores_key, tokens_key
from pipeline.ledger.messages import QueueMessage, decode_messages
from pipeline.ledger.scripts import load_script
from pipeline.ledger.status import STATUS_FIELDS, read_cache_use, read_status
from pipeline.ledger.store import store_errors
from pipeline.protocol.cache_use import CacheUse
from pipeline.protocol.failure import Ending
from pipeline.protocol.request import JobTerms, Priority, Request, RequestState, pack_tokens
from pipeline.protocol.stream import RequestStatus
from pipeline.protocol.tokens import record_bytes

# What an answer is taken to cost, until it has ended, where more was asked for: most end earlier.
EXPECTED_OUTPUT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Replay:
    """What a request has produced from an offset on, and what is needed to read on.

    `ending` is None while it goes on; `data` starts at the offset that was asked for.
    """

    ending: Ending | None
    data: bytes
    record_bytes: int
    num_prompt_tokens: int
    num_cached_tokens: int


class ClientLedger:
    """Submits, watches and cancels. All methods raise `StoreUnavailable` when Redis is away."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        *,
        limits: AdmissionLimits,
        retention_s: int,
        deadlines: TokenDeadlines = NO_TOKEN_DEADLINES,
    ) -> None:
        self._client = client
        self._limits = limits
        self._retention_s = retention_s
        self._deadlines = deadlines
        # redis-py types script arguments narrower than it takes them.
        self._scripts: dict[str, Any] = {}

    async def _run(self, name: str, *args: object) -> Any:
        script: Any = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self._client.register_script(load_script(name))
        with store_errors():
            return await script(keys=[], args=args)

    async def submit(
        self, request: Request, queue: str, channel: str, prefill_tokens_per_s: float = 0.0
    ) -> list[QueueMessage]:
        """Enter a request into the ledger, waiting in `queue`, watched by `channel`.

        Returns the messages to send: none if the request is held back until there is room for it.
        With the speed of the queue's workers the wait is predicted from the prompt tokens before it.

        Raises:
            Overloaded: a limit is reached, or it would wait longer than its queue deadline.
            RequestExists: the id is in use.
        """
        fields: dict[str, object] = {
            "model": request.model,
            "tenant": request.tenant,
            "salt": request.tenant_salt,
            "priority": int(request.priority),
            # Without defaults: an option costs only who sets it, and older workers read the rest.
            "sampling": request.sampling.model_dump_json(exclude_defaults=True),
            "prompt": pack_tokens(request.prompt_tokens),
            "num_prompt": len(request.prompt_tokens),
            "record_bytes": record_bytes(request.sampling.num_logprobs),
            "watchers": channel,
            "submission": secrets.token_hex(8),
            "expected": min(request.sampling.max_tokens, EXPECTED_OUTPUT_TOKENS),
            "queue_deadline_ms": int(request.queue_deadline_s * 1000),
            "total_deadline_ms": int(request.total_deadline_s * 1000),
        }
        if request.priority is not Priority.BATCH:
            fields["first_limit_ms"] = int(self._deadlines.first_token_s * 1000)
            fields["gap_limit_ms"] = int(self._deadlines.token_gap_s * 1000)
            if request.job is None:
                fields["tied"] = 1  # nobody can come back for it
        if request.job is not None:
            fields |= _job_fields(request.job)
        # Should the ending get lost with everything that could write it, the key still goes away.
        expiry_s = int(request.queue_deadline_s + request.total_deadline_s) + 3600
        status, *answer = await self._run(
            "submit",
            request.request_id,
            queue,
            expiry_s,
            prefill_tokens_per_s,
            self._limits.max_waiting,
            self._limits.max_waiting_tokens,
            self._limits.max_open_per_tenant,
            self._limits.max_open_per_model,
            *(item for pair in fields.items() for item in pair),
        )
        if status == b"exists":
            raise RequestExists(request.request_id)
        what, wait_ms, last = answer
        if status == b"full":
            raise refusal(
                FullWhat(what.decode()), int(wait_ms), int(last), request.queue_deadline_s
            )
        return decode_messages(last)

    async def watch(self, request_id: str, channel: str, offset_bytes: int) -> Replay | None:
        """Subscribe `channel` to a request and read its log from an offset; None if unknown."""
        reply = await self._run("watch", request_id, channel, offset_bytes)
        if not reply:
            return None
        ending, data, size, num_prompt, num_cached = reply
        return Replay(
            ending=Ending.decode(ending.decode()) if ending else None,
            data=data,
            record_bytes=int(size),
            num_prompt_tokens=int(num_prompt),
            num_cached_tokens=int(num_cached),
        )

    async def scores(self, request_id: str) -> bytes | None:
        """Records of the prompt's log-probabilities; None where there are none (yet)."""
        with store_errors():
            client: Any = self._client
            data: bytes | None = await client.get(scores_key(request_id))
            return data

    async def cache_use(self, request_id: str) -> CacheUse | None:
        """Where the KV of its prompt came from; None before its first token."""
        with store_errors():
            client: Any = self._client
            return read_cache_use(await client.hget(request_key(request_id), "cache_use") or b"")

    async def card(self, request_id: str) -> bytes | None:
        """What came with a request to be shown again; None: nothing, or dropped."""
        with store_errors():
            client: Any = self._client
            card: bytes | None = await client.hget(request_key(request_id), "card")
            return card

    async def drop_card(self, request_id: str) -> None:
        """Forget it; the request goes with its retention."""
        with store_errors():
            client: Any = self._client
            await client.hdel(request_key(request_id), "card")

    async def cancel(self, request_id: str) -> bool:
        """Cancel; False if the request is unknown or has ended already."""
        state = await self._run("cancel", request_id, self._retention_s)
        return state is not None and not RequestState(state.decode()).is_final

    async def status(self, request_id: str) -> RequestStatus | None:
        """Where a request stands; None if unknown or its retention is over."""
        return (await self.statuses([request_id]))[0]

    async def statuses(self, request_ids: Sequence[str]) -> list[RequestStatus | None]:
        """The same for many at once."""
        with store_errors():
            pipe = self._client.pipeline(transaction=True)
            for request_id in request_ids:
                pipe.hmget(request_key(request_id), list(STATUS_FIELDS))
                pipe.strlen(tokens_key(request_id))
            replies = await pipe.execute()
        return [
            read_status(request_id, replies[2 * rank], replies[2 * rank + 1])
            for rank, request_id in enumerate(request_ids)
        ]


def _job_fields(job: JobTerms) -> dict[str, object]:
    """Only those that are set."""
    fields: dict[str, object] = {
        "body_digest": job.body_digest,
        "webhook": job.webhook,
        "card": job.card,
    }
    if job.is_listed:
        fields["listed"] = 1
    return {name: value for name, value in fields.items() if value}
