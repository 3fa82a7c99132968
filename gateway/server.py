"""uvicorn, with our sockets and our way to stop."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass
from http import HTTPStatus
from types import FrameType

import orjson
import structlog
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.drain import Drain
from gateway.edge import new_request_id
from gateway.http_errors import HeadTooLarge, HttpBroken
from gateway.services import Services
from gateway.settings import GatewaySettings
from pipeline.intake.errors import RequestRefused

log = structlog.get_logger(__name__)

# A vanished client is noticed within a minute, idle or not.
_KEEPALIVE_IDLE_S = 30
_KEEPALIVE_INTERVAL_S = 10
_KEEPALIVE_PROBES = 3
_USER_TIMEOUT_MS = 60_000
_LAST_REQUESTS_S = 5  # for answers under way when the drain is over
# The parser keeps what it has of a request's head; without a bound that is all a client likes to send.
MAX_HEAD_BYTES = 64 << 10


@dataclass(slots=True, eq=False)
class _OpenHead:
    """A request line and headers that are not complete yet; counted in whole reads."""

    num_bytes: int = 0


class GatewayProtocol(HttpToolsProtocol):
    """Sends every token at once, notices dead peers, answers broken HTTP in JSON."""

    _open_head: _OpenHead | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        accepted = transport.get_extra_info("socket")
        if accepted is not None and accepted.family in (socket.AF_INET, socket.AF_INET6):
            _tune(accepted)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        head = self._open_head
        super().data_received(data)
        if head is not None and head is self._open_head:
            head.num_bytes += len(data)
            if head.num_bytes > MAX_HEAD_BYTES:
                self._refuse(HeadTooLarge(MAX_HEAD_BYTES))

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self._open_head = _OpenHead()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser; trailers, which nobody reads, are not kept."""
        if self._open_head is not None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._open_head = None
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn answers in plain text to bytes that are no HTTP request."""
        self._refuse(HttpBroken(msg))

    def _refuse(self, error: RequestRefused) -> None:
        """Answer without the app and close."""
        body = orjson.dumps(error.body())
        head = (
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nx-request-id: %s\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n"
        )
        phrase = HTTPStatus(error.status).phrase.encode()
        request_id = new_request_id().encode()
        self.transport.write(head % (error.status, phrase, request_id, len(body)) + body)
        self.transport.close()


class GatewayServer(uvicorn.Server):
    """Drains on SIGTERM and SIGINT and then exits with 0; a second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, drain: Drain) -> None:
        super().__init__(config)
        self._drain = drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Signal handler; the signal is not raised again after the end, as uvicorn would."""
        if self._drain.is_draining:
            self.should_exit = self.force_exit = True
        else:
            self._drain.begin(time.monotonic())

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second."""
        is_over = self._drain.advance(time.monotonic())
        return await super().on_tick(counter) or is_over


def make_server(app: FastAPI, settings: GatewaySettings) -> GatewayServer:
    """A server for the app, ready to run."""
    services: Services = app.state.services
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=GatewayProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_certfile=settings.tls_cert_file,
        ssl_keyfile=settings.tls_key_file,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=_LAST_REQUESTS_S,
    )
    return GatewayServer(config, services.drain)


def _tune(accepted: socket.socket) -> None:
    options = (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS),
    )
    for level, option, value in options:
        accepted.setsockopt(level, option, value)
