"""Submit and stream: POST /v1/jobs, then read the answer as often and from where you like.

A job does not end when its readers leave. With an `Idempotency-Key` the same order is one job, for
as long as the job is readable. It is readable for the pipeline's retention time after its end, then
404. Another tenant's job is 404, unless the key has the right `admin`.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.http_errors import NotFound
from gateway.job_events import JobWriter, resume_point
from gateway.job_object import answer_of, job_object, rules_of, stream_url
from gateway.job_orders import REPLAYED_HEADER, JobOrder, read_order, submit_order
from gateway.json_answer import json_answer
from gateway.paging import page_query
from gateway.routes.generations import IGNORED_HEADER
from gateway.services import Services
from gateway.sse import event_stream
from gateway.streaming import EventStreamAnswer
from pipeline.intake.build import AnswerKind
from pipeline.intake.errors import InvalidField, TokenizerUnusable
from pipeline.intake.run import follow_indexed
from pipeline.intake.tool_calls import ToolCallReader
from pipeline.ledger.job_index import JobQuery
from pipeline.protocol.request import RequestState
from pipeline.protocol.stream import RequestStatus

DEFAULT_LIMIT, MAX_LIMIT = 20, 100
_MAX_ID_CHARS = 80
_GET = ["GET", "HEAD"]


def job_routes(services: Services) -> APIRouter:
    """All job routes."""
    router = APIRouter()

    @router.post("/v1/jobs")
    async def create_job(request: Request) -> Response:
        order = await read_order(services, request)
        return _receipt(order, await submit_order(services, request, order))

    @router.api_route("/v1/jobs", methods=_GET)
    async def list_jobs(request: Request) -> Response:
        tenant = services.caller(request).tenant
        page = await services.client.jobs.page(tenant, _query(request))
        jobs = [job_object(status) for status in page.jobs]
        return json_answer(
            {
                "object": "list",
                "data": jobs,
                "first_id": jobs[0]["id"] if jobs else None,
                "last_id": jobs[-1]["id"] if jobs else None,
                "has_more": page.has_more,
            }
        )

    @router.api_route("/v1/jobs/{job_id}", methods=_GET)
    async def retrieve_job(job_id: str, request: Request) -> Response:
        return await _answer(services, await _find(services, job_id, request))

    @router.delete("/v1/jobs/{job_id}")
    async def cancel_job(job_id: str, request: Request) -> Response:
        await _find(services, job_id, request)
        await services.client.cancel(job_id)
        return await _answer(services, await _find(services, job_id, request))

    @router.get("/v1/jobs/{job_id}/stream")
    async def stream_job(job_id: str, request: Request) -> Response:
        status = await _find(services, job_id, request)
        after = resume_point(
            request.headers.get("last-event-id"), request.query_params.get("starting_after")
        )
        rules = await rules_of(services, job_id)
        reader = None if rules is None else ToolCallReader(rules, job_id)
        vocabulary = await services.models.vocabulary(status.model)
        writer = JobWriter(vocabulary, status.sampling, after, reader)
        events = follow_indexed(services.client, job_id, 0, status.sampling)
        return EventStreamAnswer(
            event_stream(events, writer),
            writer,
            _nothing,
            services.drain,
            services.settings.write_timeout_s,
        )

    return router


def _receipt(order: JobOrder, earlier: RequestStatus | None) -> Response:
    """202, for a new job as for one that the same order made before."""
    job_id = order.generation.answer_id
    state = RequestState.QUEUED if earlier is None else earlier.state
    answer = {"id": job_id, "status": str(state), "stream_url": stream_url(job_id)}
    response = json_answer(answer, status=202)
    response.headers["Location"] = f"/v1/jobs/{job_id}"
    if earlier is not None:
        response.headers[REPLAYED_HEADER] = "true"
    if order.generation.ignored:
        response.headers[IGNORED_HEADER] = ", ".join(order.generation.ignored)
    return response


async def _find(services: Services, job_id: str, request: Request) -> RequestStatus:
    """The caller's own job, or any that an admin asks for.

    Raises:
        KeyRefused: see `Services.caller`.
        NotFound: unknown, no job, too old, or another tenant's.
    """
    tenant = services.reach(request)
    if not job_id.startswith(f"{AnswerKind.JOB}-") or len(job_id) > _MAX_ID_CHARS:
        raise NotFound("job")
    status = await services.client.status(job_id)
    if status is None or tenant not in (None, status.tenant):
        raise NotFound("job")
    return status


def _query(request: Request) -> JobQuery:
    """`limit`, `after`, `order`, and the filters `status` and `model`.

    Raises:
        InvalidField: one of them makes no sense.
    """
    query = page_query(request, DEFAULT_LIMIT, MAX_LIMIT)
    state = request.query_params.get("status") or None
    if state is not None and state not in tuple(RequestState):
        names = ", ".join(RequestState)
        raise InvalidField("status", f"status must be one of {names}.")
    model = request.query_params.get("model") or None

    def is_wanted(status: RequestStatus) -> bool:
        return state in (None, status.state) and model in (None, status.model)

    return JobQuery(query.limit, is_wanted, query.after, query.ascending)


async def _answer(services: Services, status: RequestStatus) -> Response:
    job = job_object(status)
    try:
        job |= await answer_of(services, status)
    except TokenizerUnusable as unusable:
        # How the job stands is known without its text; a cancellation has been done by then.
        job |= {"text": None, "error": job["error"] or unusable.body()["error"]}
    return json_answer(job)


async def _nothing() -> None:
    """A job goes on without its readers."""
