"""GET /v1/models and one of them; an alias is a model of its own, whose `root` is the real name.

`/v1/models/` (nothing after the slash) and `//v1/models` are 404, as any unknown path. Names may hold
slashes, plain or as %2F.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.http_errors import NotFound
from gateway.json_answer import json_answer
from gateway.services import Services
from pipeline.intake.errors import UnknownModel


def model_routes(services: Services) -> APIRouter:
    """Both model routes."""
    router = APIRouter()
    intake = services.intake
    models: dict[str, dict[str, Any]] = {
        name: {
            "id": name,
            "object": "model",
            "created": services.started_s,
            "owned_by": "pointsman",
            "root": intake.model,
            "max_model_len": intake.vocabulary.max_context,
        }
        for name in intake.names
    }

    @router.api_route("/v1/models", methods=["GET", "HEAD"])
    async def list_models(request: Request) -> Response:
        services.caller(request)
        return json_answer({"object": "list", "data": list(models.values())})

    @router.api_route("/v1/models/{name:path}", methods=["GET", "HEAD"])
    async def retrieve_model(name: str, request: Request) -> Response:
        services.caller(request)
        if not name:
            raise NotFound
        if name not in models:
            raise UnknownModel(name)
        return json_answer(models[name])

    return router
