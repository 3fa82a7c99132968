"""POST /tokenize and /detokenize, in the shape that vLLM's users know. Also under /v1."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.json_answer import json_answer
from gateway.services import Services
from pipeline.intake.build import Caller, Intake
from pipeline.intake.tokenization import detokenize, tokenize

_Convert = Callable[[Callable[[str], Intake], dict[str, Any]], dict[str, Any]]


def token_routes(services: Services) -> APIRouter:
    """Both routes; each call counts as one request of its key, and costs no tokens."""
    router = APIRouter()

    async def answer(convert: _Convert, request: Request) -> Response:
        def build(body: dict[str, Any], caller: Caller) -> dict[str, Any]:
            return convert(partial(services.models.intake, caller=caller), body)

        return json_answer(await services.read(request, build))

    @router.post("/tokenize")
    @router.post("/v1/tokenize", include_in_schema=False)
    async def tokenize_prompt(request: Request) -> Response:
        return await answer(tokenize, request)

    @router.post("/detokenize")
    @router.post("/v1/detokenize", include_in_schema=False)
    async def detokenize_ids(request: Request) -> Response:
        return await answer(detokenize, request)

    return router
