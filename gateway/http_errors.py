"""Every error as OpenAI's JSON, whoever raised it.

RequestRefused (pipeline.intake.errors)
├── HttpBroken            400  invalid_http             → speak HTTP/1.1
├── NotFound              404  not_found                → check path or id
├── MethodNotAllowed      405  method_not_allowed       → see Allow
├── BodyStalled           408  request_timeout          → send the body without long pauses
├── BodyTooLarge          413  request_too_large        → send less
├── MediaTypeUnsupported  415  unsupported_media_type   → send what it says, not compressed
├── HeadTooLarge          431  headers_too_large        → send fewer or shorter headers
├── KeyReused             422  idempotency_key_reused   → another Idempotency-Key, or the same body
├── KeyRefused            401  invalid_api_key          → send Authorization: Bearer <key>
├── RightMissing          403  permission_denied        → another key
├── Draining              503  draining                 → another gateway, or later
├── RateLimited           429  rate_limit_exceeded      → after Retry-After
├── QuotaTooSmall         429  insufficient_quota       → ask for less at once
├── TenantFull            429  too_many_open_requests   → after Retry-After, or when an answer has come
├── QueueFull             503  overloaded               → after Retry-After
├── StoreAway             503  store_unavailable        → after Retry-After
└── Crashed               500  internal_error           → report it with the x-request-id
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from pipeline.errors import Overloaded, PipelineError, RequestUnknown, StoreUnavailable
from pipeline.intake.errors import INVALID_REQUEST, SERVER_ERROR, RequestRefused

_RETRY_AFTER_S = 2
_MIN_RETRY_S, _MAX_RETRY_S = 1, 60  # clients ignore or misread what is outside


class HttpBroken(RequestRefused):
    """The bytes are no HTTP request."""

    def __init__(self, message: str) -> None:
        super().__init__(400, INVALID_REQUEST, "invalid_http", None, message)


class HeadTooLarge(RequestRefused):
    """The headers go on and on."""

    def __init__(self, max_bytes: int) -> None:
        message = f"The request line and headers are larger than {max_bytes} bytes."
        super().__init__(431, INVALID_REQUEST, "headers_too_large", None, message)


class NotFound(RequestRefused):
    """No such path, file, job; or it is somebody else's."""

    def __init__(self, what: str = "path") -> None:
        super().__init__(404, INVALID_REQUEST, "not_found", None, f"There is no such {what}.")


class MethodNotAllowed(RequestRefused):
    """The path exists for other methods."""

    def __init__(self, allowed: str) -> None:
        message = f"The method is not allowed here; allowed: {allowed}."
        super().__init__(405, INVALID_REQUEST, "method_not_allowed", None, message)
        self.allowed = allowed


class BodyTooLarge(RequestRefused):
    """The body is over the limit; it was not read."""

    def __init__(self, max_bytes: int) -> None:
        message = f"The body is larger than {max_bytes} bytes."
        super().__init__(413, INVALID_REQUEST, "request_too_large", None, message)


class BodyStalled(RequestRefused):
    """The client began a body and sent nothing more for long."""

    def __init__(self) -> None:
        message = "The body did not arrive in time."
        super().__init__(408, INVALID_REQUEST, "request_timeout", None, message)


class MediaTypeUnsupported(RequestRefused):
    """The body is not said to be what the route reads: mostly JSON in UTF-8."""

    def __init__(self, media_type: str = "application/json in UTF-8") -> None:
        message = f"Send the body as {media_type}, without a content encoding."
        super().__init__(415, INVALID_REQUEST, "unsupported_media_type", None, message)


class KeyReused(RequestRefused):
    """The idempotency key was used for another body."""

    def __init__(self) -> None:
        message = "This Idempotency-Key was used with another body."
        super().__init__(422, INVALID_REQUEST, "idempotency_key_reused", None, message)


class KeyRefused(RequestRefused):
    """No API key, or none that is known."""

    def __init__(self) -> None:
        message = "The API key is missing or wrong."
        super().__init__(401, INVALID_REQUEST, "invalid_api_key", None, message)


class RightMissing(RequestRefused):
    """The key is known, but may not do this."""

    def __init__(self, right: str) -> None:
        message = f"This API key lacks the right '{right}'."
        super().__init__(403, "permission_error", "permission_denied", None, message)


class Draining(RequestRefused):
    """This gateway is about to stop."""

    def __init__(self) -> None:
        super().__init__(503, SERVER_ERROR, "draining", None, "The server is shutting down.")
        self.retry_after_s = _RETRY_AFTER_S


class RateLimited(RequestRefused):
    """The key has spent what its window allows. `what` is `requests` or `tokens`."""

    def __init__(
        self, what: str, limit: str, retry_after_s: int, headers: Mapping[str, str]
    ) -> None:
        message = f"The rate limit of this key is reached: {what}, {limit}."
        super().__init__(429, what, "rate_limit_exceeded", None, message)
        self.headers = headers
        self.retry_after_s = min(max(retry_after_s, _MIN_RETRY_S), _MAX_RETRY_S)


class QuotaTooSmall(RequestRefused):
    """The request alone is more than the key may spend in a window: waiting does not help."""

    def __init__(self, limit: int, num_tokens: int) -> None:
        message = f"The request may take {num_tokens} tokens; this key has {limit} in a window."
        super().__init__(429, "insufficient_quota", "insufficient_quota", None, message)
        self.should_retry = False


class TenantFull(RequestRefused):
    """The caller has as many open requests as one tenant may have."""

    def __init__(self, retry_after_s: int) -> None:
        message = "Too many of your requests wait or run already."
        super().__init__(429, "requests", "too_many_open_requests", None, message)
        self.retry_after_s = min(max(retry_after_s, _MIN_RETRY_S), _MAX_RETRY_S)


class QueueFull(RequestRefused):
    """Too many requests wait already, or this one would wait too long, or the memory for bodies is full."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(503, SERVER_ERROR, "overloaded", None, "Too many requests wait already.")
        self.retry_after_s = min(max(retry_after_s, _MIN_RETRY_S), _MAX_RETRY_S)


class StoreAway(RequestRefused):
    """Redis does not answer."""

    def __init__(self) -> None:
        message = "The server cannot take requests at the moment."
        super().__init__(503, SERVER_ERROR, "store_unavailable", None, message)
        self.retry_after_s = _RETRY_AFTER_S


class Crashed(RequestRefused):
    """A bug of ours; the details are in the log and nowhere else."""

    def __init__(self) -> None:
        super().__init__(500, SERVER_ERROR, "internal_error", None, "The server has failed.")


def refusal_from(error: PipelineError) -> RequestRefused:
    """What a pipeline error means to a client."""
    if isinstance(error, Overloaded):
        kind = TenantFull if error.is_callers_own else QueueFull
        return kind(error.retry_after_s)
    if isinstance(error, StoreUnavailable):
        return StoreAway()
    return NotFound("job") if isinstance(error, RequestUnknown) else Crashed()


def error_response(error: RequestRefused) -> Response:
    """The whole answer: status, headers, JSON."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.should_retry is not None:
        headers["x-should-retry"] = "true" if error.should_retry else "false"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = error.allowed
    if isinstance(error, RateLimited):
        headers.update(error.headers)
    if isinstance(error, KeyRefused):
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        orjson.dumps(error.body()), error.status, headers=headers, media_type="application/json"
    )


def install_error_handlers(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Make the app, whose routes are in `routers`, answer with our shape only."""

    async def refused(_: Request, error: Exception) -> Response:
        if isinstance(error, PipelineError):
            return error_response(refusal_from(error))
        return error_response(error if isinstance(error, RequestRefused) else Crashed())

    async def unrouted(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        if status == MethodNotAllowed("").status:
            return error_response(MethodNotAllowed(", ".join(allowed_methods(routers, request))))
        return error_response(NotFound())

    app.add_exception_handler(RequestRefused, refused)
    app.add_exception_handler(PipelineError, refused)
    app.add_exception_handler(HTTPException, unrouted)


def allowed_methods(routers: Sequence[APIRouter], request: Request) -> list[str]:
    """Methods of all routes that match the request's path."""
    methods: set[str] = set()
    for router in routers:
        for route in router.routes:
            if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
                methods |= route.methods or set()
    return sorted(methods)
