"""POST /v1/chat/completions and /v1/completions, streamed and whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.cache_header import tell_cache_use
from gateway.metrics import Event
from gateway.services import Services
from gateway.sse import ChunkWriter, event_stream
from gateway.streaming import EventStreamAnswer, run_while_connected
from pipeline.intake.build import AnswerKind, Generation
from pipeline.intake.run import cancel_all, collect, follow_all, submit_all

IGNORED_HEADER = "X-Ignored-Params"


def generation_routes(services: Services) -> APIRouter:
    """Both OpenAI routes. Fields that were passed over are named in `X-Ignored-Params`."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        return await _answer(services, AnswerKind.CHAT, request)

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        return await _answer(services, AnswerKind.COMPLETION, request)

    return router


async def _answer(services: Services, kind: AnswerKind, request: Request) -> Response:
    generation = await services.accept(kind, request)
    if generation.streams:
        response = await _stream(services, generation)
    else:
        response = await _whole(services, generation, request)
    if generation.ignored:
        response.headers[IGNORED_HEADER] = ", ".join(generation.ignored)
    return response


async def _stream(services: Services, generation: Generation) -> Response:
    """Submitted before the answer begins, so that a refusal still has its own status."""
    await submit_all(services.client, generation)
    writer = ChunkWriter(generation, generation.vocabulary)
    return EventStreamAnswer(
        event_stream(_events(services, generation), writer),
        writer,
        lambda: _abandon(services, generation),
        services.drain,
        services.settings.write_timeout_s,
    )


async def _whole(services: Services, generation: Generation, request: Request) -> Response:
    await submit_all(services.client, generation)
    answer = await run_while_connected(
        collect(_events(services, generation), generation, generation.vocabulary),
        request.receive if services.settings.cancel_on_disconnect else None,
        services.drain,
        lambda: _abandon(services, generation),
    )
    response = Response(orjson.dumps(answer), media_type="application/json")
    await tell_cache_use(services, generation, response)
    return response


def _events(services: Services, generation: Generation) -> AsyncGenerator[Event, None]:
    events = follow_all(services.client, generation)
    return services.metrics.metered(events, generation.requests[0].model)


async def _abandon(services: Services, generation: Generation) -> None:
    """Nobody waits for the answer any more."""
    services.metrics.abandoned.inc()
    if services.settings.cancel_on_disconnect or services.drain.is_draining:
        await cancel_all(services.client, generation)
