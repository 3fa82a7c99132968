"""Tells the servers of those who asked for it that a job has ended.

The headers and the signature are those of the Standard Webhooks specification, which openai-python's
`client.webhooks.unwrap` checks: HMAC-SHA256 over `<id>.<timestamp>.<body>`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import time

import httpx
import orjson
import structlog

from gateway.metrics import GatewayMetrics
from gateway.webhook_target import TargetRefused, check_url, resolve
from pipeline.cancellation import end_tasks
from pipeline.errors import StoreUnavailable
from pipeline.intake.errors import RequestRefused
from pipeline.ledger.webhooks import DueWebhook, WebhookQueue

log = structlog.get_logger(__name__)

TIMEOUT_S = 10.0
POLL_S = 0.25
MAX_AT_ONCE = 8
MAX_TRIES = 5
LEASE_MS = 30_000
_BACKOFF_MS, _BACKOFF_FACTOR = 2_000, 4  # 2, 8, 32, 128 s
_GONE = 410
_SECRET_PREFIX = "whsec_"  # noqa: S105


class WebhookSender:
    """Takes what is due from the ledger's queue; every gateway has one, each webhook goes to one."""

    def __init__(
        self, queue: WebhookQueue, metrics: GatewayMetrics, *, allows_private: bool
    ) -> None:
        self._queue = queue
        self._metrics = metrics
        self._allows_private = allows_private
        self._task: asyncio.Task[None] | None = None
        self._http: httpx.AsyncClient | None = None

    def start(self) -> None:
        """Begin to look for webhooks."""
        self._task = asyncio.create_task(self._run(), name="webhooks")

    async def close(self) -> None:
        """Stop; what is under way comes again when its lease is over."""
        if self._task is not None:
            await end_tasks(self._task)
        if self._http is not None:
            await self._http.aclose()

    async def _run(self) -> None:
        while True:
            due: list[DueWebhook] = []
            try:
                due = await self._queue.take(MAX_AT_ONCE, LEASE_MS)
                await asyncio.gather(*(self._send(webhook) for webhook in due))
            except StoreUnavailable:
                pass  # what was taken comes again when its lease is over
            except Exception:
                # The task's edge: without it this gateway would tell nobody any more, in silence.
                log.exception("webhooks_failed")
                self._metrics.webhooks.labels("failed").inc()
            if not due:
                await asyncio.sleep(POLL_S)

    async def _client(self) -> httpx.AsyncClient:
        """Made when first needed, off the event loop: reading the certificates takes a while."""
        if self._http is None:
            context = await asyncio.to_thread(httpx.create_ssl_context, trust_env=False)
            # No proxy and no redirect: what was checked is where it goes.
            self._http = httpx.AsyncClient(verify=context, timeout=TIMEOUT_S, trust_env=False)
        return self._http

    async def _send(self, due: DueWebhook) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                cause, is_final = await self._post(await self._client(), due)
        except httpx.InvalidURL:
            cause, is_final = "InvalidURL", True
        except (httpx.HTTPError, OSError, TimeoutError) as error:
            cause, is_final = type(error).__name__, False
        if cause is None:
            self._metrics.webhooks.labels("delivered").inc()
            await self._queue.done(due.job_id)
            return
        is_over = is_final or due.num_tries + 1 >= MAX_TRIES
        self._metrics.webhooks.labels("given_up" if is_over else "failed").inc()
        log.warning("webhook_failed", request=due.job_id, cause=cause, is_over=is_over)
        if is_over:
            await self._queue.done(due.job_id)
        else:
            await self._queue.again(due.job_id, _BACKOFF_MS * _BACKOFF_FACTOR**due.num_tries)

    async def _post(self, http: httpx.AsyncClient, due: DueWebhook) -> tuple[str | None, bool]:
        """(Why it failed or None, whether another try would be in vain)."""
        try:
            url = check_url(due.webhook.url, allows_private=self._allows_private)
            target = await resolve(url, allows_private=self._allows_private)
        except RequestRefused:
            return "forbidden", True
        except TargetRefused as refused:
            return str(refused), False
        body = _event(due)
        headers = signed_headers(due, body, int(time.time()))
        answer = await http.send(target.request(http, headers, body), stream=True)
        await answer.aclose()
        if answer.is_success:
            return None, True
        return f"status {answer.status_code}", answer.status_code == _GONE


def signed_headers(due: DueWebhook, body: bytes, now_s: int) -> dict[str, str]:
    """The event's id (the same for every try), the time, and the signature over both and the body."""
    event_id = f"evt_{due.job_id}"
    signed = f"{event_id}.{now_s}.".encode() + body
    digest = hmac.new(_secret_bytes(due.webhook.secret.get_secret_value()), signed, hashlib.sha256)
    return {
        "content-type": "application/json",
        "user-agent": "pointsman-webhook",
        "webhook-id": event_id,
        "webhook-timestamp": str(now_s),
        "webhook-signature": "v1," + base64.b64encode(digest.digest()).decode(),
    }


def _event(due: DueWebhook) -> bytes:
    return orjson.dumps(
        {
            "id": f"evt_{due.job_id}",
            "object": "event",
            "type": f"job.{due.state}",
            "created_at": due.ended_s,
            "data": {"id": due.job_id},
        }
    )


def _secret_bytes(secret: str) -> bytes:
    """`whsec_` and base64, or any other text as it is."""
    if secret.startswith(_SECRET_PREFIX):
        with contextlib.suppress(binascii.Error, ValueError):
            return base64.b64decode(secret.removeprefix(_SECRET_PREFIX), validate=True)
    return secret.encode()
