"""Submit and stream: POST /v1/jobs, then read the answer as often and from where you like.

A job does not end when its readers leave. With an `Idempotency-Key` the same order is one job, for
as long as the job is readable. It is readable for the pipeline's retention time after its
end, then 404. Another tenant's job is 404.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.http_errors import NotFound
from gateway.job_events import JobWriter, resume_point
from gateway.job_orders import REPLAYED_HEADER, read_order, submit_order
from gateway.json_answer import json_answer
from gateway.routes.generations import IGNORED_HEADER
from gateway.services import Services
from gateway.sse import event_stream
from gateway.streaming import EventStreamAnswer
from pipeline.intake.build import AnswerKind
from pipeline.intake.errors import refusal_of
from pipeline.intake.response import ChoiceCollector, usage_object
from pipeline.intake.run import follow_indexed
from pipeline.protocol.failure import Ending
from pipeline.protocol.request import RequestState
from pipeline.protocol.stream import RequestStatus

_MAX_ID_CHARS = 80


def job_routes(services: Services) -> APIRouter:
    """All job routes."""
    router = APIRouter()

    @router.post("/v1/jobs")
    async def create_job(request: Request) -> Response:
        order = await read_order(services, request)
        earlier = await submit_order(services, request, order)
        job_id = order.generation.answer_id
        state = RequestState.QUEUED if earlier is None else earlier.state
        answer = {"id": job_id, "status": str(state), "stream_url": _stream_url(job_id)}
        response = json_answer(answer, status=202)
        response.headers["Location"] = f"/v1/jobs/{job_id}"
        if earlier is not None:
            response.headers[REPLAYED_HEADER] = "true"
        if order.generation.ignored:
            response.headers[IGNORED_HEADER] = ", ".join(order.generation.ignored)
        return response

    @router.api_route("/v1/jobs/{job_id}", methods=["GET", "HEAD"])
    async def retrieve_job(job_id: str, request: Request) -> Response:
        return json_answer(await _describe(services, await _find(services, job_id, request)))

    @router.delete("/v1/jobs/{job_id}")
    async def cancel_job(job_id: str, request: Request) -> Response:
        await _find(services, job_id, request)
        await services.client.cancel(job_id)
        return json_answer(await _describe(services, await _find(services, job_id, request)))

    @router.get("/v1/jobs/{job_id}/stream")
    async def stream_job(job_id: str, request: Request) -> Response:
        status = await _find(services, job_id, request)
        after = resume_point(
            request.headers.get("last-event-id"), request.query_params.get("starting_after")
        )
        writer = JobWriter(services.intake.vocabulary, status.sampling, after)
        events = follow_indexed(services.client, job_id, 0, status.sampling)
        return EventStreamAnswer(
            event_stream(events, writer),
            writer,
            _nothing,
            services.drain,
            services.settings.write_timeout_s,
        )

    return router


async def _find(services: Services, job_id: str, request: Request) -> RequestStatus:
    """The caller's own job.

    Raises:
        KeyRefused: see `Services.caller`.
        NotFound: unknown, no job, too old, or another tenant's.
    """
    caller = services.caller(request)
    if not job_id.startswith(f"{AnswerKind.JOB}-") or len(job_id) > _MAX_ID_CHARS:
        raise NotFound("job")
    status = await services.client.status(job_id)
    if status is None or status.tenant != caller.tenant:
        raise NotFound("job")
    return status


async def _describe(services: Services, status: RequestStatus) -> dict[str, Any]:
    """A job as JSON; with its text and how it ended once it has."""
    ending = status.ending or Ending()
    refused = refusal_of(ending) if ending.failure is not None else None
    text = None
    if status.state.is_final:
        collector = ChoiceCollector(status.sampling, services.intake.vocabulary)
        events = follow_indexed(services.client, status.request_id, 0, status.sampling)
        async with aclosing(events):
            async for _, event in events:
                collector.feed(event)
        text = collector.outcome.text
    return {
        "id": status.request_id,
        "object": "job",
        "status": str(status.state),
        "model": status.model,
        "created": int(status.created_s),
        "stream_url": _stream_url(status.request_id),
        "text": text,
        "finish_reason": None if ending.reason is None else str(ending.reason),
        "error": None if refused is None else refused.body()["error"],
        "usage": usage_object(status.usage),
    }


def _stream_url(job_id: str) -> str:
    return f"/v1/jobs/{job_id}/stream"


async def _nothing() -> None:
    """A job goes on without its readers."""
