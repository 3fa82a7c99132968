"""Sends one batch request to the gateway until there is a final answer."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from http import HTTPStatus
from typing import Any

import httpx

from pipeline.batch.errors import GatewayGone, GatewayRefuses
from pipeline.batch.line_client import MAX_SERVER_FAILURES, Answer, OnWait, backoff_s
from pipeline.batch.reader import BatchRequest

MAX_RETRY_AFTER_S = 60.0
# Longer than the gateway's deadline for requests at batch priority. A dead peer is found by keep-alive.
READ_LIMIT_S = 25 * 3600.0
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
_BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_ALL_LINES_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class GatewayClient:
    """One gateway, one connection pool. `on_wait` hears why a request waits ("" when it goes on).

    A gateway that is away or overloaded is waited for, `patience_s` seconds without any answer; a
    busy one (429, 503, a queue deadline) for as long as it takes.
    """

    def __init__(
        self,
        url: str,
        window: int,
        *,
        api_key: str | None,
        patience_s: float,
        on_wait: OnWait,
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._patience_s = patience_s
        self._on_wait = on_wait
        self._last_answer_s = time.monotonic()
        self._http = httpx.AsyncClient(
            base_url=self._url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(10.0, read=READ_LIMIT_S, pool=None),
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=window, max_keepalive_connections=window),
                socket_options=_KEEPALIVE,
                trust_env=False,
            ),
            trust_env=False,
        )

    async def open(self) -> None:
        """See `LineClient`: it connects when it is first asked."""

    async def close(self) -> None:
        """Close the connections; requests in flight are cancelled at the gateway by that."""
        await self._http.aclose()

    async def complete(self, request: BatchRequest) -> Answer:
        """Send the request at batch priority, again and again where that helps.

        Raises:
            GatewayRefuses: the key is refused.
            GatewayGone: nobody answered for `patience_s`.
        """
        body = {**request.body, "priority": "batch"}
        num_tries, num_failures = 0, 0
        while True:
            num_tries += 1
            try:
                response = await self._http.post(request.url, json=body)
            except httpx.TransportError as error:
                await self._wait_for_gateway(error, num_tries)
                continue
            self._last_answer_s = time.monotonic()
            if response.status_code in _ALL_LINES_REFUSED:
                raise GatewayRefuses(response.status_code, _message(_json(response)))
            num_failures += not _is_busy(response)
            if not _may_retry(response) or num_failures >= MAX_SERVER_FAILURES:
                self._on_wait("")
                request_id = response.headers.get("x-request-id", "")
                return Answer(response.status_code, request_id, _json(response))
            self._on_wait(f"the gateway answers {response.status_code}")
            await asyncio.sleep(_delay_s(response, num_tries))

    async def _wait_for_gateway(self, error: httpx.TransportError, num_tries: int) -> None:
        if time.monotonic() - self._last_answer_s > self._patience_s:
            raise GatewayGone(self._url, self._patience_s, type(error).__name__) from error
        self._on_wait(f"the gateway is away ({type(error).__name__})")
        await asyncio.sleep(backoff_s(num_tries))


def _is_busy(response: httpx.Response) -> bool:
    code = _code(_json(response))
    return response.status_code in _BUSY or code in ("queue_timeout", "no_workers")


def _may_retry(response: httpx.Response) -> bool:
    hint = response.headers.get("x-should-retry")
    if hint in ("true", "false"):
        return bool(hint == "true")
    return (
        response.status_code in (*_BUSY, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT)
        or response.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR
    )


def _delay_s(response: httpx.Response, num_tries: int) -> float:
    try:
        asked_s = float(response.headers.get("Retry-After", ""))
    except ValueError:
        return backoff_s(num_tries)
    return min(max(asked_s, 0.0), MAX_RETRY_AFTER_S) * random.uniform(1.0, 1.1)  # noqa: S311


def _json(response: httpx.Response) -> Any:
    """The body; one that is not JSON (a proxy's page) is wrapped in an error of our shape."""
    try:
        return response.json()
    except ValueError:
        message = f"the answer is not JSON: {response.text[:200]}"
        error = {
            "message": message,
            "type": "server_error",
            "param": None,
            "code": "invalid_answer",
        }
        return {"error": error}


def _code(body: Any) -> str | None:
    error = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else None


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", "")) if isinstance(error, dict) else ""
