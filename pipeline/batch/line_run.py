"""Runs one line of a batch as the HTTP routes would run its body, and follows it over any kill.

A line's request id is made of the batch and the line alone. A runner that takes over submits the same
ids, finds them in the ledger and reads their tokens, so that no line runs twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import orjson
import structlog

from pipeline.batch.line_source import LineText
from pipeline.batch.line_store import LineResult
from pipeline.batch.records import BatchRecord
from pipeline.batch.results import response_line
from pipeline.client import PipelineClient
from pipeline.errors import PipelineError, RequestExists, StoreUnavailable
from pipeline.intake.build import AnswerKind, Caller, Generation
from pipeline.intake.errors import (
    ModelForbidden,
    RequestCancelled,
    RequestFailed,
    RequestRefused,
    TokenizerUnusable,
    UnknownModel,
    UnsupportedField,
)
from pipeline.intake.model_catalog import ModelCatalog
from pipeline.intake.run import cancel_all, collect, follow_all
from pipeline.ledger.keys import model_slug
from pipeline.protocol.failure import FailureCode
from pipeline.protocol.request import Priority
from pipeline.protocol.stream import RequestUsage, StreamEvent, TokensArrived

log = structlog.get_logger(__name__)

KINDS = {
    "/v1/chat/completions": AnswerKind.CHAT,
    "/v1/completions": AnswerKind.COMPLETION,
}
RETRY_S = 1.0
MODEL_RETRY_S = 5.0  # looks for a model cost more
_DIGEST_BYTES = 16
_GRACE_S = 60.0
_OK = 200


class LineStopped(Exception):
    """The batch is over before the line was answered."""


def line_digest(batch_id: str, line: int) -> str:
    """32 hex digits that only who knows the batch's id can tell."""
    text = f"{batch_id}:{line}".encode()
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).hexdigest()


def line_request_id(batch: BatchRecord, line: int) -> str:
    """The id of a line's answer, and of its request if there is one choice."""
    return f"{KINDS[batch.endpoint]}-{line_digest(batch.id, line)}"


@dataclass(slots=True)
class LineRunner:
    """Runs lines for all batches. `num_running` lines of a model, by slug, are producing tokens now."""

    client: PipelineClient
    models: ModelCatalog
    building: Executor
    caller_of: Callable[[str], Caller]
    num_running: Counter[str] = field(default_factory=Counter)
    _in_flight: dict[tuple[int, int], Generation] = field(default_factory=dict)

    async def run(self, batch: BatchRecord, line: LineText, stop: asyncio.Event) -> LineResult:
        """The line's answer, be it a completion or a refusal.

        A cancelled caller leaves the requests running. With `stop` set, requests that are cancelled
        have no answer.

        Raises:
            LineStopped: see above.
        """
        place = (batch.number, line.place.line)
        try:
            generation = await self._generation(batch, line, stop)
            self._in_flight[place] = generation
            answer = await self._answer(generation, stop)
        except RequestRefused as refused:
            return _result(batch, line, refused.status, refused.body())
        finally:
            self._in_flight.pop(place, None)
        return _result(batch, line, _OK, answer)

    def slug_of(self, line: LineText) -> str | None:
        """The model that a line asks for; None if nobody knows it."""
        known = self.models.by_name.get(line.model)
        return None if known is None else model_slug(known.name)

    async def cancel(self, batch: BatchRecord) -> None:
        """Ask for the end of all requests of a batch that `run` follows now."""
        for (number, _), generation in list(self._in_flight.items()):
            if number == batch.number:
                await cancel_all(self.client, generation)

    async def _generation(
        self, batch: BatchRecord, line: LineText, stop: asyncio.Event
    ) -> Generation:
        """What the line asks for; waits for a model that is away, or whose files cannot be loaded now.

        Raises:
            RequestRefused: the line asks for what cannot be had.
            LineStopped: `stop` was set before it was there.
        """
        while True:
            try:
                return await self.models.run(self.building, partial(self._build, batch, line))
            except TokenizerUnusable:
                log.debug("batch_line_waits", model=line.model, cause="TokenizerUnusable")
            except UnknownModel as unknown:
                if isinstance(unknown, ModelForbidden) or not self._may_come_back(batch, line):
                    raise
            await _sleep_or_stop(MODEL_RETRY_S, stop)

    def _may_come_back(self, batch: BatchRecord, line: LineText) -> bool:
        """True of an unknown model where nobody lives at all, or that has answered this batch before.

        Its workers and we may be starting together; only one that never was is a line's own fault.
        """
        is_proven = line.model == batch.model and batch.num_completed > 0
        return is_proven or not self.client.known_fleet.workers

    def _build(self, batch: BatchRecord, line: LineText) -> Generation:
        body = line.body()
        if body.get("stream"):
            raise UnsupportedField("stream", "A line of a batch cannot be streamed.")
        # The batch itself ends first, so that what is open then counts as expired, not as failed.
        left_s = max(0.0, batch.expires_s - time.time()) + _GRACE_S
        caller = replace(
            self.caller_of(batch.tenant),
            priority=Priority.BATCH,
            queue_deadline_s=left_s,
            total_deadline_s=left_s,
            models=batch.models,
        )
        request_id = line_request_id(batch, line.place.line)
        return self.models.build(KINDS[batch.endpoint], body, caller, request_id)

    async def _answer(self, generation: Generation, stop: asyncio.Event) -> dict[str, Any]:
        """The whole answer; waits for a pipeline that is full or away, or lost it.

        Raises:
            RequestRefused: the pipeline has ended a request otherwise.
            LineStopped: `stop` was set before it ended.
        """
        while True:
            try:
                await self._submit(generation, stop)
                slug = model_slug(generation.requests[0].model)
                events = self._counted(follow_all(self.client, generation), slug)
                return await collect(events, generation, generation.vocabulary)
            except RequestCancelled:
                if stop.is_set():
                    raise LineStopped from None
                raise
            except RequestFailed as failed:
                if not await self._runs_on(generation, failed):
                    raise
            except (
                PipelineError
            ) as error:  # also one that Redis lost: the next round submits it again
                cause = type(error).__name__
                log.debug("batch_line_waits", request_id=generation.answer_id, cause=cause)
                await _sleep_or_stop(RETRY_S, stop)

    async def _submit(self, generation: Generation, stop: asyncio.Event) -> None:
        """Queue what is not queued yet."""
        for request in generation.requests:
            if stop.is_set():
                raise LineStopped
            try:
                await self.client.submit(request)
            except RequestExists:
                continue

    async def _runs_on(self, generation: Generation, failed: RequestFailed) -> bool:
        """True when only our patience with Redis ended, not the request."""
        if failed.code != FailureCode.INTERNAL_ERROR:
            return False
        try:
            found = [await self.client.status(item.request_id) for item in generation.requests]
        except StoreUnavailable:
            return True
        return all(status is None or not status.state.is_final for status in found)

    async def _counted(
        self, events: AsyncGenerator[tuple[int, StreamEvent], None], slug: str
    ) -> AsyncGenerator[tuple[int, StreamEvent], None]:
        """The same events; the line counts as running from its first tokens on."""
        is_running = False
        try:
            async with aclosing(events):
                async for index, event in events:
                    if not is_running and isinstance(event, TokensArrived):
                        is_running = True
                        self.num_running[slug] += 1
                    yield index, event
        finally:
            self.num_running[slug] -= is_running


def crashed_result(batch: BatchRecord, line: LineText) -> LineResult:
    """What a line gets that our own code cannot run."""
    failed = RequestFailed(FailureCode.INTERNAL_ERROR)
    return _result(batch, line, failed.status, failed.body())


def _result(batch: BatchRecord, line: LineText, status: int, body: dict[str, Any]) -> LineResult:
    digest = line_digest(batch.id, line.place.line)
    output = response_line(
        line.place.custom_id, status, f"req-{digest}", body, line_id=f"batch_req_{digest}"
    )
    is_success = status == _OK
    return LineResult(
        batch=batch.number,
        line=line.place.line,
        is_success=is_success,
        output=orjson.dumps(output),
        usage=_usage(body) if is_success else RequestUsage(0, 0, 0),
    )


def _usage(answer: dict[str, Any]) -> RequestUsage:
    usage = answer["usage"]
    return RequestUsage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )


async def _sleep_or_stop(limit_s: float, stop: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await stop.wait()
    except TimeoutError:
        return
    raise LineStopped
