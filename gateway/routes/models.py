"""GET /v1/models and one of them; an alias is a model of its own, whose `root` is the real name.

A key sees those that it may use. `/v1/models/` (nothing after the slash) and `//v1/models` are 404, as
any unknown path. Names may hold slashes, plain or as %2F.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.http_errors import NotFound
from gateway.json_answer import json_answer
from gateway.services import Services
from pipeline.intake.known_models import KnownModel


def model_routes(services: Services) -> APIRouter:
    """Both model routes."""
    router = APIRouter()

    def shown(name: str, known: KnownModel) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": services.started_s,
            "owned_by": "pointsman",
            "root": known.name,
            "max_model_len": services.models.max_context(known),
        }

    @router.api_route("/v1/models", methods=["GET", "HEAD"])
    async def list_models(request: Request) -> Response:
        caller = services.caller(request)
        await services.models.look()
        models = services.models.by_name.items()
        data = [shown(name, known) for name, known in models if caller.may_use(name)]
        return json_answer({"object": "list", "data": data})

    @router.api_route("/v1/models/{name:path}", methods=["GET", "HEAD"])
    async def retrieve_model(name: str, request: Request) -> Response:
        caller = services.caller(request)
        if not name:
            raise NotFound
        if name not in services.models.by_name:
            await services.models.look()
        return json_answer(shown(name, services.models.find(name, caller)))

    return router
