"""The outermost layer: a request id and the key's limits on every answer, a count of it, and a last resort."""

from __future__ import annotations

import uuid

import structlog
from fastapi.responses import Response
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http_errors import Crashed, error_response
from gateway.metrics import GatewayMetrics
from gateway.rate_limits import RATE_HEADERS
from gateway.streaming import ClientGone

log = structlog.get_logger(__name__)
UNROUTED = "other"
CLIENT_CLOSED_STATUS = 499  # nginx's number; nobody reads it


class Edge:
    """Pure ASGI middleware. A client's own `x-request-id` is never taken over: it is not unique."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection event of the server."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_request_id()
        status = 0

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers.update(scope.get("state", {}).get(RATE_HEADERS, {}))
            await send(message)

        with structlog.contextvars.bound_contextvars(http_request_id=request_id):
            try:
                await self._app(scope, receive, send_marked)
            except ClientGone:
                status = CLIENT_CLOSED_STATUS
                await Response(status_code=status)(scope, receive, send_marked)
            except Exception:
                log.exception("request_crashed", route=_route_label(scope))
                if status:
                    raise  # the server closes the connection, so that nobody takes it for a clean end
                await error_response(Crashed())(scope, receive, send_marked)
            finally:
                self._metrics.http_requests.labels(_route_label(scope), f"{status // 100}xx").inc()


def new_request_id() -> str:
    """The id of one answer, for clients to quote."""
    return f"req-{uuid.uuid4().hex}"


def _route_label(scope: Scope) -> str:
    """The pattern of the route that took the request, never the path itself."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else UNROUTED
