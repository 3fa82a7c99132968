"""One pub/sub subscription for a whole gateway process, fanned out to its streams.

Pub/sub is only the bell; the token log is the truth. A stream that may have missed something (it is
new, its buffer ran over, a gap shows, the connection broke, it was silent for long) reads the log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import redis.asyncio
import structlog

from pipeline.cancellation import end_tasks
from pipeline.errors import RequestUnknown, StoreUnavailable
from pipeline.ledger.client_ledger import ClientLedger, Replay
from pipeline.ledger.keys import gateway_channel
from pipeline.protocol.failure import Ending, FailureCode
from pipeline.protocol.stream import RequestUsage, StreamEnded, TokensArrived
from pipeline.protocol.tokens import record_bytes, unpack_records

log = structlog.get_logger(__name__)

MAX_BUFFERED_MESSAGES = 256
SILENCE_S = 3.0
RECONNECT_S = 0.2
PING_S = 5.0


class LogPart(NamedTuple):
    """One published piece of a token log."""

    offset_bytes: int
    data: bytes
    ending: str
    num_cached: int


@dataclass(slots=True, eq=False)
class _Mailbox:
    """What arrived for one stream; `behind` means: read the log first."""

    parts: deque[LogPart] = field(default_factory=deque)
    rung: asyncio.Event = field(default_factory=asyncio.Event)
    behind: bool = True
    was_silent: bool = False

    def put(self, part: LogPart) -> None:
        self.was_silent = False
        if not self.behind:
            if len(self.parts) < MAX_BUFFERED_MESSAGES:
                self.parts.append(part)
            else:
                self.fall_behind()
        self.rung.set()

    def fall_behind(self) -> None:
        self.behind = True
        self.parts.clear()
        self.rung.set()


class TokenHub:
    """Delivers the tokens of any request, from any index on, exactly once and in order."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        ledger: ClientLedger,
        gateway: str,
        *,
        give_up_after_s: float,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._channel = gateway_channel(gateway)
        self._give_up_after_s = give_up_after_s
        self._mailboxes: dict[str, set[_Mailbox]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closing = False
        self._is_subscribed = True  # so that a first failure is told
        self.num_reconnects = 0

    @property
    def channel(self) -> str:
        """Where workers publish for this process."""
        return self._channel

    @property
    def num_streams(self) -> int:
        """Streams being followed."""
        return sum(len(boxes) for boxes in self._mailboxes.values())

    async def start(self) -> None:
        """Begin to listen; returns at once, also when Redis is away."""
        self._tasks = [
            asyncio.create_task(self._listen_for_ever(), name="token-hub"),
            asyncio.create_task(self._doubt_silence(), name="token-hub-silence"),
        ]

    async def close(self) -> None:
        """Stop listening."""
        self._is_closing = True
        await end_tasks(*self._tasks)

    async def _doubt_silence(self) -> None:
        """Make streams that heard nothing for a while look at the log: a bell can get lost.

        One timer for all streams; one each would cost more than the tokens.
        """
        while not self._is_closing:
            await asyncio.sleep(SILENCE_S)
            for boxes in self._mailboxes.values():
                for box in boxes:
                    if box.was_silent:
                        box.fall_behind()
                    box.was_silent = True

    async def _listen_for_ever(self) -> None:
        while not self._is_closing:
            try:
                await self._listen()
            except (redis.RedisError, OSError, TimeoutError) as error:
                if self._is_subscribed:
                    log.warning("token_subscription_lost", error=type(error).__name__)
            except Exception:
                # The task's edge: were it to end, streams would only come in pieces, for ever.
                log.exception("token_subscription_failed")
            else:
                continue
            self._is_subscribed = False
            self.num_reconnects += 1
            self._fall_behind()
            await asyncio.sleep(RECONNECT_S)

    async def _listen(self) -> None:
        # redis-py's stubs leave pubsub untyped.
        pubsub: Any = self._client.pubsub(ignore_subscribe_messages=True)
        try:
            await pubsub.subscribe(self._channel)
            if not self._is_subscribed:
                log.info("token_subscription_back", channel=self._channel)
            self._is_subscribed = True
            self._fall_behind()  # published while we were away: only the log has it
            while not self._is_closing:
                message = await pubsub.get_message(timeout=PING_S)
                if message is None:
                    # A half-open link shows only when something is sent over it.
                    await asyncio.wait_for(pubsub.ping(), PING_S)
                elif message["type"] == "message":
                    self._dispatch(message["data"])
        finally:
            with contextlib.suppress(redis.RedisError, OSError, TimeoutError):
                await pubsub.aclose()

    def _dispatch(self, data: bytes) -> None:
        try:
            for raw_id, offset_bytes, part, ending, num_cached in msgpack.unpackb(data, raw=True):
                boxes = self._mailboxes.get(raw_id.decode())
                for box in boxes or ():
                    box.put(LogPart(offset_bytes, part, ending.decode(), num_cached))
        except (ValueError, TypeError, AttributeError) as error:
            # Of another build, perhaps; whom it was for is not known, and the log can be read.
            log.warning("token_message_unreadable", num_bytes=len(data), error=type(error).__name__)
            self._fall_behind()

    def _fall_behind(self) -> None:
        for boxes in self._mailboxes.values():
            for box in boxes:
                box.fall_behind()

    async def follow(
        self, request_id: str, *, first_index: int, num_logprobs: int | None
    ) -> AsyncIterator[TokensArrived | StreamEnded]:
        """Yield the tokens from `first_index` on, then how it ended.

        Raises:
            RequestUnknown: no such request.
        """
        box = _Mailbox()
        self._mailboxes.setdefault(request_id, set()).add(box)
        try:
            reader = _LogReader(self._ledger, self._channel, request_id, num_logprobs)
            reader.skip_to(first_index)
            async for event in reader.read(box, self._give_up_after_s):
                yield event
        finally:
            boxes = self._mailboxes[request_id]
            boxes.discard(box)
            if not boxes:
                del self._mailboxes[request_id]


class _LogReader:
    """One reader's place in one token log."""

    def __init__(
        self, ledger: ClientLedger, channel: str, request_id: str, num_logprobs: int | None
    ) -> None:
        self._ledger = ledger
        self._channel = channel
        self._request_id = request_id
        self._num_logprobs = num_logprobs
        self._record_bytes = record_bytes(num_logprobs)
        self._next_byte = 0
        self._num_prompt_tokens = 0

    def skip_to(self, index: int) -> None:
        """Start at an output index."""
        self._next_byte = index * self._record_bytes

    async def read(
        self, box: _Mailbox, give_up_after_s: float
    ) -> AsyncIterator[TokensArrived | StreamEnded]:
        """Replay while behind, follow while not, until the ending.

        Given up is only after so long without a word from Redis, however long the request runs.
        """
        clock = asyncio.get_running_loop().time
        patience_until = clock() + give_up_after_s
        ended = False
        while not ended:
            if not box.behind:
                events = self._take_parts(box)
            elif (replay := await self._replay(box)) is not None:
                events = self._take_replay(replay)
            elif clock() > patience_until:
                events = [self._ended(Ending(failure=FailureCode.INTERNAL_ERROR), 0)]
            else:
                await asyncio.sleep(RECONNECT_S)
                continue
            patience_until = clock() + give_up_after_s
            _heed_cancellation()
            for event in events:
                yield event
                ended = isinstance(event, StreamEnded)
            if not ended and not box.behind:
                await self._wait(box)

    def _take_replay(self, replay: Replay) -> list[TokensArrived | StreamEnded]:
        events = self._advance(LogPart(self._next_byte, replay.data, "", replay.num_cached_tokens))
        if replay.ending is not None:
            events.append(self._ended(replay.ending, replay.num_cached_tokens))
        return events

    def _take_parts(self, box: _Mailbox) -> list[TokensArrived | StreamEnded]:
        """Everything that arrived, up to a gap."""
        events: list[TokensArrived | StreamEnded] = []
        while box.parts:
            part = box.parts.popleft()
            if part.offset_bytes > self._next_byte:
                box.fall_behind()
                break
            events += self._advance(part)
            if part.ending:
                events.append(self._ended(Ending.decode(part.ending), part.num_cached))
                break
        return _merged(events)

    async def _replay(self, box: _Mailbox) -> Replay | None:
        # Cleared first: what is published from here on waits in the box.
        box.behind = False
        box.parts.clear()
        try:
            replay = await self._ledger.watch(self._request_id, self._channel, self._next_byte)
        except StoreUnavailable:
            box.behind = True
            return None
        if replay is None:
            raise RequestUnknown(self._request_id)
        self._num_prompt_tokens = replay.num_prompt_tokens
        return replay

    def _advance(self, part: LogPart) -> list[TokensArrived | StreamEnded]:
        """Take what is new in a part; a part that was seen already is empty."""
        data = part.data[self._next_byte - part.offset_bytes :]
        size = len(data) // self._record_bytes * self._record_bytes
        if not size:
            return []
        index = self._next_byte // self._record_bytes
        self._next_byte += size
        return [TokensArrived(index, list(unpack_records(data[:size], self._num_logprobs)))]

    def _ended(self, ending: Ending, num_cached: int) -> StreamEnded:
        usage = RequestUsage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._next_byte // self._record_bytes,
            cached_tokens=num_cached,
        )
        return StreamEnded(ending, usage)

    @staticmethod
    async def _wait(box: _Mailbox) -> None:
        box.rung.clear()
        if not box.parts and not box.behind:
            await box.rung.wait()


def _heed_cancellation() -> None:
    """End here if the task was cancelled and a library on the way swallowed it.

    redis-py does so when a cancellation meets it in the middle of a command.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _merged(events: list[TokensArrived | StreamEnded]) -> list[TokensArrived | StreamEnded]:
    """Neighbouring arrivals as one: a reader that was busy writes once for all of them."""
    merged: list[TokensArrived | StreamEnded] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, TokensArrived) and isinstance(last, TokensArrived):
            merged[-1] = TokensArrived(last.index, last.records + event.records)
        else:
            merged.append(event)
    return merged
