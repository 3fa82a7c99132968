"""/v1/files: uploads for batches, and what batches have written.

Names that clients send are shown again and used for nothing. Another tenant's file is 404. An input
file of an unfinished batch cannot be deleted. Files expire: 30 days after they came, unless
`expires_after` says otherwise.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.batch_desk import BatchDesk, now_s
from gateway.file_answer import file_answer
from gateway.json_answer import json_answer
from gateway.paging import page_query
from gateway.services import Services
from gateway.upload import read_upload
from pipeline.batch.refusals import ObjectUnknown

DEFAULT_LIMIT = MAX_LIMIT = 10_000
_GET = ["GET", "HEAD"]


def file_routes(services: Services, desk: BatchDesk) -> APIRouter:
    """All file routes."""
    router = APIRouter()

    @router.post("/v1/files")
    async def create_file(request: Request) -> Response:
        tenant = services.batch_caller(request).tenant
        services.drain.refuse_new_work()
        with services.drain.active():
            limits = services.settings
            async with read_upload(request, limits.max_file_bytes, limits.read_timeout_s) as upload:
                record = await desk.store(
                    desk.files.create,
                    tenant,
                    upload.name,
                    upload.content,
                    upload.lifetime_s,
                    now_s(),
                )
        return json_answer(record.as_object())

    @router.api_route("/v1/files", methods=_GET)
    async def list_files(request: Request) -> Response:
        tenant = services.caller(request).tenant
        query = page_query(request, DEFAULT_LIMIT, MAX_LIMIT)
        purpose = request.query_params.get("purpose") or None
        page = await desk.store(desk.files.page, tenant, query, purpose, now_s())
        return json_answer(page.as_object())

    @router.api_route("/v1/files/{file_id}", methods=_GET)
    async def retrieve_file(file_id: str, request: Request) -> Response:
        tenant = services.caller(request).tenant
        record = await desk.store(desk.files.find, tenant, file_id, now_s())
        return json_answer(record.as_object())

    @router.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str, request: Request) -> Response:
        tenant = services.caller(request).tenant
        await desk.store(desk.files.delete, tenant, file_id, now_s())
        return json_answer({"id": file_id, "object": "file", "deleted": True})

    @router.api_route("/v1/files/{file_id}/content", methods=_GET)
    async def retrieve_content(file_id: str, request: Request) -> Response:
        tenant = services.caller(request).tenant
        record = await desk.store(desk.files.find, tenant, file_id, now_s())
        try:
            file = await desk.store(desk.files.storage.open, record.id)
        except FileNotFoundError as error:  # deleted just now
            raise ObjectUnknown("file") from error
        return file_answer(request, record, file, services.drain)

    return router
