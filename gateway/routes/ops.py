"""Probes and metrics, for machines.

Probes need no key; where others do, they name neither models nor workers, and metrics need one too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.openapi import openapi_document
from gateway.services import Services
from pipeline.errors import StoreUnavailable
from pipeline.ledger.keys import model_slug
from pipeline.scheduling.fleet import Fleet

READY_LIMIT_S = 0.15
_GET = ["GET", "HEAD"]
_Answer = TypeVar("_Answer")


def ops_routes(services: Services) -> APIRouter:
    """`/livez`, `/healthz`, `/health`: this process answers. `/readyz`: a request would be served."""
    router = APIRouter()

    async def alive() -> Response:
        return Response(b'{"status":"alive"}', media_type="application/json")

    for path in ("/livez", "/healthz", "/health"):
        router.add_api_route(path, alive, methods=_GET)

    document = orjson.dumps(openapi_document())

    @router.api_route("/openapi.json", methods=_GET)
    async def openapi() -> Response:
        return Response(document, media_type="application/json")

    @router.api_route("/readyz", methods=_GET)
    async def ready() -> Response:
        reasons = await _reasons_against(services)
        body = {"status": "unready" if reasons else "ready", "reasons": reasons}
        status = 503 if reasons else 200
        return Response(orjson.dumps(body), status, media_type="application/json")

    @router.api_route("/metrics", methods=_GET)
    async def metrics(request: Request) -> Response:
        services.admit_scraper(request)
        client = services.client
        fleet, backlog, nodes = await asyncio.gather(
            _soon(client.fleet()), _soon(client.backlog()), _soon(client.node_reports())
        )
        models = {model_slug(known.name): known.name for known in services.models.by_name.values()}
        text = services.metrics.text(fleet, backlog, nodes or [], models)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router


async def _soon(answer: Awaitable[_Answer]) -> _Answer | None:
    """What Redis answers, None when it does not in time."""
    try:
        async with asyncio.timeout(READY_LIMIT_S):
            return await answer
    except (StoreUnavailable, TimeoutError):
        return None


async def _reasons_against(services: Services) -> list[str]:
    """Why a request that comes now would not be served; empty when it would."""
    if services.drain.is_draining:
        return ["this gateway is shutting down"]
    fleet = await _soon(services.client.fleet())
    if fleet is None:
        return ["Redis does not answer"]
    if not fleet.ready:
        counts = f"workers that can serve: prefill {fleet.num_prefill}, decode {fleet.num_decode}"
        return [counts, *_stuck(services, fleet)]
    return []


def _stuck(services: Services, fleet: Fleet) -> list[str]:
    """By name, without its random part; where keys are needed strangers get the number alone."""
    if services.keys.is_open or not fleet.stuck:
        return [f"{name.partition('#')[0]} is stuck" for name in fleet.stuck]
    return [f"workers that are stuck: {len(fleet.stuck)}"]
