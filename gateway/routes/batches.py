"""/v1/batches: many requests in one file, answered within a day, behind everybody who waits.

A batch that is validating or in progress can be cancelled; one that is being cancelled, or was, stays
as it is; one that is finalizing or over is 400. Another tenant's batch is 404, unless the key has the
right `admin`. A batch keeps the models that its key might use when it was ordered.
"""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.batch_desk import BatchDesk, now_s
from gateway.json_answer import json_answer
from gateway.paging import page_query
from gateway.services import Services
from pipeline.batch.batch_body import parse_order
from pipeline.intake.json_body import parse_json_object

DEFAULT_LIMIT, MAX_LIMIT = 20, 100
_GET = ["GET", "HEAD"]


def batch_routes(services: Services, desk: BatchDesk) -> APIRouter:
    """All batch routes."""
    router = APIRouter()

    @router.post("/v1/batches")
    async def create_batch(request: Request) -> Response:
        caller = services.batch_caller(request)
        services.drain.refuse_new_work()
        async with services.bodies.read(request) as data:
            order = replace(parse_order(parse_json_object(data)), models=caller.models)
        batch = await desk.store(desk.batches.create, caller.tenant, order, now_s())
        desk.wake()
        return json_answer(batch.as_object())

    @router.api_route("/v1/batches", methods=_GET)
    async def list_batches(request: Request) -> Response:
        tenant = services.caller(request).tenant
        query = page_query(request, DEFAULT_LIMIT, MAX_LIMIT)
        page = await desk.store(desk.batches.page, tenant, query)
        return json_answer(page.as_object())

    @router.api_route("/v1/batches/{batch_id}", methods=_GET)
    async def retrieve_batch(batch_id: str, request: Request) -> Response:
        tenant = services.reach(request)
        return json_answer((await desk.store(desk.batches.find, tenant, batch_id)).as_object())

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(batch_id: str, request: Request) -> Response:
        tenant = services.reach(request)
        batch = await desk.store(desk.batches.cancel, tenant, batch_id, now_s())
        desk.wake()
        return json_answer(batch.as_object())

    return router
