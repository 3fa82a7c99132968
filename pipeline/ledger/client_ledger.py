"""The ledger as a gateway uses it: asyncio."""

from __future__ import annotations

import secrets
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
from pipeline.ledger.store import store_errors
from pipeline.protocol.failure import Ending
from pipeline.protocol.request import Priority, Request, RequestState, pack_tokens
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.stream import RequestStatus, RequestUsage
from pipeline.protocol.tokens import record_bytes

_STATUS_FIELDS = (
    "state", "model", "tenant", "sampling", "num_prompt", "cached", "ending", "node", "attempt",
    "created_ms", "body_digest",
)  # fmt: skip

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
        if request.job is not None:
            fields["body_digest"] = request.job.body_digest
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

    async def cancel(self, request_id: str) -> bool:
        """Cancel; False if the request is unknown or has ended already."""
        state = await self._run("cancel", request_id, self._retention_s)
        return state is not None and not RequestState(state.decode()).is_final

    async def status(self, request_id: str) -> RequestStatus | None:
        """Where a request stands; None if unknown or its retention is over."""
        with store_errors():
            pipe = self._client.pipeline(transaction=True)
            pipe.hmget(request_key(request_id), list(_STATUS_FIELDS))
            pipe.strlen(tokens_key(request_id))
            values, log_bytes = await pipe.execute()
        if values[0] is None:
            return None
        fields = {
            name: (value or b"").decode()
            for name, value in zip(_STATUS_FIELDS, values, strict=True)
        }
        sampling = SamplingParams.model_validate_json(fields["sampling"])
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
            created_s=int(fields["created_ms"]) / 1000,
            body_digest=fields["body_digest"],
        )
