"""POST /tokenize and /detokenize, in the shape that vLLM's users know. Also under /v1."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.json_answer import json_answer
from gateway.services import Services
from pipeline.intake.tokenization import detokenize, tokenize


def token_routes(services: Services) -> APIRouter:
    """Both routes; each call counts as one request of its key, and costs no tokens."""
    router = APIRouter()

    @router.post("/tokenize")
    @router.post("/v1/tokenize", include_in_schema=False)
    async def tokenize_prompt(request: Request) -> Response:
        return json_answer(
            await services.read(request, lambda body, _: tokenize(services.models.intake, body))
        )

    @router.post("/detokenize")
    @router.post("/v1/detokenize", include_in_schema=False)
    async def detokenize_ids(request: Request) -> Response:
        return json_answer(
            await services.read(request, lambda body, _: detokenize(services.models.intake, body))
        )

    return router
