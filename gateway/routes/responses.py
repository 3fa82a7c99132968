"""/v1/responses, text and calls of functions: background work, GET by id, cancel, streams that are resumed.

A stored response is readable for the pipeline's retention time after its end, then 404. Only a
background response goes on without its client, and only it can be cancelled by its id.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.cache_header import tell_cache_use
from gateway.http_errors import NotFound
from gateway.job_events import resume_point
from gateway.job_object import text_of
from gateway.json_answer import json_answer
from gateway.response_events import ResponseWriter, response_stream
from gateway.response_object import PREFIX, ResponseHead
from gateway.routes.generations import IGNORED_HEADER
from gateway.services import Services
from gateway.streaming import EventStreamAnswer, run_while_connected
from pipeline.intake.build import AnswerKind, Generation
from pipeline.intake.errors import InvalidField, RequestRefused, refusal_of
from pipeline.intake.responses_body import ResponseCard, ResponseOrder, parse_response, renamed
from pipeline.intake.run import (
    cancel_all,
    collect_choices,
    follow_all,
    follow_indexed,
    submit_all,
)
from pipeline.intake.tool_calls import said_with_calls, split_calls
from pipeline.intake.vocabulary import Vocabulary
from pipeline.protocol.failure import Ending
from pipeline.protocol.request import JobTerms, RequestState
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.stream import RequestStatus, RequestUsage

_MAX_ID_CHARS = 80
_GET = ["GET", "HEAD"]


def response_routes(services: Services) -> APIRouter:
    """All of them that are supported."""
    router = APIRouter()

    @router.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        order = await services.read(request, lambda body, _: parse_response(body))
        generation = await _build(services, request, order)
        await services.charge(request, generation)
        answer = await _run(services, request, order, generation)
        if generation.ignored:
            answer.headers[IGNORED_HEADER] = ", ".join(generation.ignored)
        return answer

    @router.api_route("/v1/responses/{response_id}", methods=_GET)
    async def retrieve_response(response_id: str, request: Request) -> Response:
        status, card = await _find(services, response_id, request)
        if request.query_params.get("stream") == "true":
            after = resume_point(None, request.query_params.get("starting_after"))
            voice = await _voice_of(services, status)
            return _stream(services, _head(status, card), voice, after)
        return json_answer(await _object(services, status, card))

    @router.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(response_id: str, request: Request) -> Response:
        status, card = await _find(services, response_id, request)
        if not card.is_background:
            raise InvalidField("response_id", "Only a background response can be cancelled.")
        await services.client.cancel(status.request_id)
        status, card = await _find(services, response_id, request)
        return json_answer(await _object(services, status, card))

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> Response:
        status, _ = await _find(services, response_id, request)
        await services.client.cancel(status.request_id)
        await services.client.drop_card(status.request_id)
        return json_answer({"id": response_id, "object": "response", "deleted": True})

    return router


async def _build(services: Services, request: Request, order: ResponseOrder) -> Generation:
    """The chat that a response comes to, behind the conversation that it continues."""
    caller = services.caller(request)
    history = await _history(services, request, order.card.previous_response_id)
    chat = order.chat_body(history)
    answer_id = PREFIX + secrets.token_hex(16)
    try:
        generation = await services.build(AnswerKind.CHAT, chat, caller, answer_id)
    except RequestRefused as refused:
        raise renamed(refused) from None
    card, terms = order.card.reading(generation.tools), JobTerms()
    if order.is_stored:
        messages = [*history, *(order.card.messages or [])]
        card = card.model_copy(update={"messages": messages})
        terms = JobTerms(card=card.encode())
    ignored = tuple(dict.fromkeys((*order.ignored, *generation.ignored)))
    return generation.as_job(terms).ignoring(ignored)


async def _history(
    services: Services, request: Request, previous_id: str | None
) -> list[dict[str, Any]]:
    """The conversation up to and with the answer of an earlier response.

    Raises:
        InvalidField: there is none, it has not ended, or it is too long to have been kept.
    """
    if previous_id is None:
        return []
    place = "previous_response_id"
    try:
        status, card = await _find(services, previous_id, request)
    except NotFound:
        raise InvalidField(place, f"{place} names no response that is kept.") from None
    text = await text_of(services, status)
    if text is None:
        raise InvalidField(place, f"{place} names a response that has not ended.")
    if card.messages is None:
        raise InvalidField(place, f"{place} names a conversation too long to be continued.")
    said, calls = split_calls(text, card.rules, status.request_id)
    return [*card.messages, {"role": "assistant"} | said_with_calls(said, calls)]


async def _run(
    services: Services, request: Request, order: ResponseOrder, generation: Generation
) -> Response:
    card = order.card.reading(generation.tools)
    head = ResponseHead(
        generation.answer_id, generation.model, generation.created_s, card, order.is_stored
    )
    await submit_all(services.client, generation)
    if order.streams:
        asked = generation.requests[0]
        voice = _Voice(asked.model, generation.vocabulary, asked.sampling)
        return _stream(services, head, voice, is_tied=not order.card.is_background)
    if order.card.is_background:
        return json_answer(head.unfinished("queued"))
    events = follow_all(services.client, generation)
    metered = services.metrics.metered(events, generation.requests[0].model)
    (outcome,) = await run_while_connected(
        collect_choices(metered, generation, generation.vocabulary),
        request.receive if services.settings.cancel_on_disconnect else None,
        services.drain,
        lambda: cancel_all(services.client, generation),
    )
    ending = outcome.ending or Ending()
    refused = refusal_of(ending)
    if refused is not None:
        raise refused
    answer = json_answer(head.ended(outcome.text, ending, outcome.usage or RequestUsage(0, 0, 0)))
    await tell_cache_use(services, generation, answer)
    return answer


@dataclass(frozen=True, slots=True)
class _Voice:
    """What turns the tokens of an answer into text."""

    model: str
    vocabulary: Vocabulary
    sampling: SamplingParams


async def _voice_of(services: Services, status: RequestStatus) -> _Voice:
    """That of a stored response. Raises `TokenizerUnusable`."""
    vocabulary = await services.models.vocabulary(status.model)
    return _Voice(status.model, vocabulary, status.sampling)


def _stream(
    services: Services,
    head: ResponseHead,
    voice: _Voice,
    after: int = -1,
    *,
    is_tied: bool = False,
) -> Response:
    """The events behind `after`. A response that `is_tied` to this reader ends when the reader leaves."""
    response_id = head.response_id
    writer = ResponseWriter(head, voice.vocabulary, voice.sampling, after)

    async def abandon() -> None:
        if is_tied and (services.settings.cancel_on_disconnect or services.drain.is_draining):
            await services.client.abandon([response_id])

    events = follow_indexed(services.client, response_id, 0, voice.sampling)
    return EventStreamAnswer(
        response_stream(services.metrics.metered(events, voice.model), writer),
        writer,
        abandon,
        services.drain,
        services.settings.write_timeout_s,
    )


async def _find(
    services: Services, response_id: str, request: Request
) -> tuple[RequestStatus, ResponseCard]:
    """The caller's own response.

    Raises:
        KeyRefused: see `Services.caller`.
        NotFound: unknown, not stored, deleted, too old, or another tenant's.
    """
    caller = services.caller(request)
    if not response_id.startswith(PREFIX) or len(response_id) > _MAX_ID_CHARS:
        raise NotFound("response")
    status = await services.client.status(response_id)
    card = await services.client.card(response_id)
    if status is None or card is None or status.tenant != caller.tenant:
        raise NotFound("response")
    return status, ResponseCard.model_validate_json(card)


def _head(status: RequestStatus, card: ResponseCard) -> ResponseHead:
    created_s = int(status.times.created_s)
    return ResponseHead(status.request_id, card.model, created_s, card, is_stored=True)


async def _object(services: Services, status: RequestStatus, card: ResponseCard) -> dict[str, Any]:
    head = _head(status, card)
    if not status.state.is_final:
        is_queued = status.state is RequestState.QUEUED and status.times.claimed_s is None
        return head.unfinished("queued" if is_queued else "in_progress")
    text = await text_of(services, status)
    return head.ended(text or "", status.ending or Ending(), status.usage)
