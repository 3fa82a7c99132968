"""What is told of the routes, to people and to machines, is what the app has."""

from __future__ import annotations

import httpx
from fastapi import FastAPI
from fastapi.routing import APIRoute

from gateway.api_page import PAGE, updated
from gateway.endpoints import CHAT, COMPLETION, ENDPOINTS, RESPONSE
from gateway.openapi import body_schema

UNTOLD = {"/healthz", "/health", "/v1/tokenize", "/v1/detokenize"}  # second names


def test_the_page_has_the_tables_that_the_code_makes() -> None:
    page = PAGE.read_text("utf-8")
    assert updated(page) == page, "run `python -m gateway.api_page`"


def test_every_route_is_told_and_no_other(app: FastAPI) -> None:
    routers = [route for route in app.routes if isinstance(route, APIRoute)]
    served = {
        (method, route.path.replace(":path", ""))
        for route in routers or routes_of(app)
        for method in route.methods - {"HEAD"}
        if route.path not in UNTOLD
    }
    assert {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS} == served


def routes_of(app: FastAPI) -> list[APIRoute]:
    """Routes of included routers, which newer versions keep apart."""
    routers = [getattr(route, "original_router", None) for route in app.routes]
    return [
        route
        for router in routers
        if router is not None
        for route in router.routes
        if isinstance(route, APIRoute)
    ]


def test_every_supported_field_has_a_type() -> None:
    for body in (CHAT, COMPLETION, RESPONSE):
        properties = body_schema(body)["properties"]
        assert body.policy is not None
        assert body.policy.supported - set(properties) <= {"service_tier"}
        assert set(body.required) <= set(properties)


async def test_the_document_is_served_without_a_key(keyed_http: httpx.AsyncClient) -> None:
    document = (await keyed_http.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    assert "/v1/chat/completions" in document["paths"]
    assert "$ref" not in str(document["paths"]["/v1/chat/completions"]["post"]["requestBody"])
