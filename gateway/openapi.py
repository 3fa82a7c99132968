"""The OpenAPI document, from the models that check the bodies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gateway.endpoints import ENDPOINTS, Body, Endpoint

_ERROR_TEXT = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string", "maxLength": 1024},
                "type": {"type": "string"},
                "param": _ERROR_TEXT,
                "code": _ERROR_TEXT,
            },
        }
    },
}
_LIMITS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
}
_ID = re.compile(r"\{(\w+)\}")


def openapi_document() -> dict[str, Any]:
    """All routes, OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Pointsman", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def body_schema(body: Body) -> dict[str, Any]:
    """JSON schema of a body, self-contained; fields that are passed over take anything."""
    schema = body.shape.model_json_schema()
    more = {} if body.more is None else body.more.model_json_schema()
    definitions = more.get("$defs", {}) | schema.get("$defs", {})
    properties: dict[str, Any] = more.get("properties", {}) | schema.get("properties", {})
    if body.policy is not None:
        properties = {k: v for k, v in properties.items() if k in body.policy.supported}
        properties |= {name: {} for name in sorted(body.policy.ignored)}
    found = {
        "type": "object",
        "properties": properties,
        "required": ["model", *body.required],
        "additionalProperties": False,
    }
    whole: dict[str, Any] = _inlined(found, definitions)
    return whole


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _ID.findall(endpoint.path)
    ]
    parameters += [
        {"name": name, "in": "query", "schema": {"type": "string"}} for name in endpoint.query
    ]
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()}{re.sub(r'[^a-z]+', '_', endpoint.path)}",
        "parameters": parameters,
        "security": [] if endpoint.is_open else [{"key": []}],
        "responses": {
            str(endpoint.status): {"description": "Done", "content": {endpoint.kind: {}}},
            "default": {"description": "Refused or failed", "content": error},
        },
    }
    if endpoint.body is not None:
        content = {"application/json": {"schema": body_schema(endpoint.body)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _inlined(value: Any, definitions: Mapping[str, Any]) -> Any:
    """The schema with its references replaced by what they stand for; none of ours is recursive.

    Limits behind a validator of ours keep pydantic's names, which JSON schema does not know.
    """
    if isinstance(value, list):
        return [_inlined(item, definitions) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return _inlined(definitions[value["$ref"].rsplit("/", 1)[1]], definitions)
    return {
        _LIMITS.get(key, key): _inlined(item, definitions)
        for key, item in value.items()
        if not (key == "title" and isinstance(item, str))
    }
