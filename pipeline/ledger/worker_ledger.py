"""The ledger as workers and upkeep use it: synchronous, from any thread."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import redis
from pydantic import ValidationError

from pipeline.ledger.claim import (
    ClaimedRequest,
    ClaimRefusal,
    ClaimUnreadable,
    TailHint,
    decode_claim,
)
from pipeline.ledger.drain_orders import DrainOrder
from pipeline.ledger.keys import running_key
from pipeline.ledger.messages import QueueMessage, broker_lists, decode_messages
from pipeline.ledger.scripts import load_script
from pipeline.ledger.store import store_errors
from pipeline.protocol.failure import Ending, FailureCode
from pipeline.protocol.request import Priority, unpack_tokens
from pipeline.protocol.sampling import SamplingParams

RETRY_PAUSE_S = 1.0

# What `step.lua` passes on to gateways: (id, byte offset, bytes, ending, cached prompt tokens).
_PACK = msgpack.Packer(use_bin_type=False).pack


class LogWrite(NamedTuple):
    """Bytes for one token log. `ending` is empty while the request goes on.

    `cache_use`: a `CacheUse` as JSON, told with the first bytes of an attempt, and kept as the request's
    own or, if the log was begun by others, as that of the last worker that took it up again.
    """

    request_id: str
    attempt: int
    offset_bytes: int
    data: bytes
    ending: str
    num_cached: int
    cache_use: str = ""


@dataclass(frozen=True, slots=True)
class StepReply:
    """What a step's write came back with.

    cancelled: request ids to stop. stale: (request id, attempt) pairs that no longer own their
    request. short: request ids whose log lost its end with the store and must be sent whole.
    messages: to be sent for requests that got the room of those that ended.
    """

    cancelled: list[str]
    stale: list[tuple[str, int]]
    short: list[str]
    messages: list[QueueMessage]


class WaitingRequest(NamedTuple):
    """A request that no worker has, as far as its cached blocks are concerned."""

    request_id: str
    prompt_tokens: list[int]
    sampling: SamplingParams
    tenant_salt: str


class BeatReply(NamedTuple):
    """Store clock in ms, request ids to stop, the drain that was ordered, how many requests are ours.

    waiting: prompts by priority that no worker has yet, over the number of workers that may take them.
    """

    now_ms: int
    cancelled: list[str]
    drain: DrainOrder | None
    num_owned: int
    waiting: dict[Priority, int]


class WorkerLedger:
    """Claims, writes and moves requests; every write is fenced by (worker, attempt).

    All methods raise `StoreUnavailable` when Redis does not answer; each may then be repeated.
    A request that lost its second worker rests for `retry_pause_s`, and after each further loss for
    twice as long, at most 8 s.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        max_attempts: int,
        retention_s: int,
        dead_letter_retention_s: int = 86_400,
        retry_pause_s: float = RETRY_PAUSE_S,
    ) -> None:
        self._client = client
        self._max_attempts = max_attempts
        self._retention_s = retention_s
        self._dead_letter_retention_s = dead_letter_retention_s
        self._retry_pause_ms = int(retry_pause_s * 1000)
        # redis-py types script arguments narrower than it takes them.
        self._scripts: dict[str, Any] = {}

    def _run(self, name: str, *args: object) -> Any:
        script: Any = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self._client.register_script(load_script(name))
        with store_errors():
            return script(keys=[], args=args)

    def claim(
        self, request_id: str, worker: str, queues: Sequence[str]
    ) -> ClaimedRequest | ClaimRefusal:
        """Own a queued request, or learn why not. Raises `ClaimUnreadable` too."""
        reply = self._run("claim", request_id, worker, self._retention_s, *queues)
        return decode_claim(request_id, reply)

    def next_in_line(
        self, queues: Sequence[str], count: int, known: Collection[str] = ()
    ) -> list[WaitingRequest]:
        """Who goes next on these queues, `count` at most, as far as that is known. Changes nothing.

        `known` are request ids whose prompts need not come: theirs are empty. What another build
        wrote and we cannot read is left out.
        """
        reply = self._run("next_in_line", count, len(known), *known, *queues)
        waiting = []
        for request_id, prompt, sampling_json, salt in zip(*[iter(reply)] * 4, strict=True):
            with suppress(ValidationError):
                sampling = SamplingParams.model_validate_json(sampling_json)
                waiting.append(
                    WaitingRequest(
                        request_id.decode(), unpack_tokens(prompt), sampling, salt.decode()
                    )
                )
        return waiting

    def write_step(self, worker: str, writes: Sequence[LogWrite]) -> StepReply:
        """Append to logs, publish, end requests, collect cancellations; repeatable."""
        args: list[object] = [worker, self._retention_s, len(writes)]
        for write in writes:
            args += (
                write.request_id,
                write.attempt,
                write.offset_bytes,
                write.data,
                write.ending,
                write.num_cached,
                write.cache_use,
                _PACK((write.request_id, write.offset_bytes, write.data, "", 0)),
            )
        cancelled, stale, short, messages = self._run("step", *args)
        pairs = [item.decode() for item in stale]
        return StepReply(
            cancelled=[item.decode() for item in cancelled],
            stale=[(pairs[i], int(pairs[i + 1])) for i in range(0, len(pairs), 2)],
            short=[item.decode() for item in short],
            messages=decode_messages(messages),
        )

    def end_unreadable(self, worker: str, claim: ClaimUnreadable) -> list[QueueMessage]:
        """Fail a request that we own and do not understand; messages to send."""
        ending = Ending(failure=FailureCode.INTERNAL_ERROR).encode()
        write = LogWrite(claim.request_id, claim.attempt, 0, b"", ending, 0)
        return self.write_step(worker, [write]).messages

    def write_scores(self, request_id: str, worker: str, attempt: int, data: bytes) -> bool:
        """Keep the prompt's log-probabilities; False if stale. Repeatable."""
        reply = self._run("score", request_id, worker, attempt, data, self._retention_s)
        return bool(reply)

    def hand_over(
        self, request_id: str, worker: str, attempt: int, queue: str, tail: TailHint | None
    ) -> list[QueueMessage] | None:
        """Queue a running request for its next worker; messages to send, or None if stale."""
        hint = tail.encode() if tail is not None else ""
        return _messages(self._run("hand_over", request_id, worker, attempt, queue, hint))

    def convict(self, worker: str) -> str | None:
        """Decide who is charged for the loss of a worker; the request that is proven guilty of it.

        To be called before `requeue_lost`.
        """
        guilty = self._run("convict", worker)
        return guilty.decode() if guilty else None

    def requeue_lost(self, request_id: str, worker: str, queue: str) -> list[QueueMessage] | None:
        """Take a request from a worker whose lease ran out; messages if it is queued again."""
        return self._requeue(request_id, worker, queue, "lost")

    def give_back(self, request_id: str, worker: str, queue: str) -> list[QueueMessage] | None:
        """Return a request that this worker will not finish; not counted as a lost attempt."""
        return self._requeue(request_id, worker, queue, "returned")

    def _requeue(
        self, request_id: str, worker: str, queue: str, why: str
    ) -> list[QueueMessage] | None:
        limits = (
            self._max_attempts,
            self._retention_s,
            self._dead_letter_retention_s,
            self._retry_pause_ms,
        )
        return _messages(self._run("requeue", request_id, worker, queue, why, *limits))

    def release(self) -> list[QueueMessage]:
        """Release held requests as far as there is room; messages to send."""
        return decode_messages(self._run("release"))

    def revive(self, request_id: str, queue: str, expiry_s: int) -> list[QueueMessage] | None:
        """Queue a dead letter again; messages to send, or None if it is none or too old."""
        return _messages(self._run("revive", request_id, queue, expiry_s))

    def cancel(self, request_id: str) -> str | None:
        """Cancel; the state it was in, or None if unknown."""
        state = self._run("cancel", request_id, self._retention_s)
        return state.decode() if state else None

    def expire(self, request_id: str, code: FailureCode) -> str | None:
        """Fail a request if a deadline passed; which one: queue, total, first_token or token_gap."""
        why = self._run("expire", request_id, str(code), self._retention_s)
        return why.decode() if why else None

    def place(self, request_id: str, from_queue: str, to_queue: str) -> list[QueueMessage] | None:
        """Move a waiting request to another queue; messages, or None if it moved already."""
        return _messages(self._run("place", request_id, from_queue, to_queue))

    def forget_queue(self, queue: str) -> bool:
        """Let go of a queue that nobody serves any more, with its messages; False if requests wait in it."""
        return bool(self._run("forget_queue", queue, *broker_lists(queue)))

    def beat(self, worker: str, lease_s: float, state_json: str) -> BeatReply:
        """Renew the worker's lease and state; what it is told to do."""
        now_ms, cancelled, limit_s, comes_back, num_owned, waiting = self._run(
            "beat", worker, int(lease_s * 1000), state_json
        )
        return BeatReply(
            int(now_ms),
            [item.decode() for item in cancelled],
            DrainOrder(float(limit_s), comes_back == b"1") if limit_s else None,
            int(num_owned),
            dict(zip(Priority, map(int, waiting), strict=False)),
        )

    def owned_by(self, worker: str) -> list[str]:
        """The requests that a worker owns."""
        with store_errors():
            members: Any = self._client.smembers(running_key(worker))
        return [item.decode() for item in members]

    def leave(self, worker: str) -> bool:
        """Strike ourselves off the list; False while we still own requests (the lease ends)."""
        return bool(self._run("leave", worker))

    def strike_off(self, worker: str) -> bool:
        """Strike a lost worker off; False if it has a lease again, or still owns requests."""
        return bool(self._run("leave", worker, "lost"))


def _messages(reply: Any) -> list[QueueMessage] | None:
    return None if reply is None else decode_messages(reply)
