"""Work that outlives its connection: ordered once, however often the order is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from fastapi import Request
from pydantic import BaseModel, Field, SecretStr

from gateway.http_errors import KeyReused
from gateway.job_object import card_of
from gateway.services import Services
from gateway.settings import GatewaySettings
from gateway.webhook_target import check_url
from pipeline.errors import RequestExists
from pipeline.intake.build import AnswerKind, Caller, Generation
from pipeline.intake.errors import InvalidField
from pipeline.intake.run import submit_all
from pipeline.intake.schemas import Strict, validate
from pipeline.ledger.webhooks import Webhook
from pipeline.protocol.request import JobTerms
from pipeline.protocol.stream import RequestStatus

KEY_HEADER = "Idempotency-Key"
REPLAYED_HEADER = "Idempotency-Replayed"
MAX_KEY_CHARS = 255
MIN_SECRET_CHARS, MAX_SECRET_CHARS = 16, 256
_TAG = b"pointsman.idempotency\0"


@dataclass(frozen=True, slots=True)
class JobOrder:
    """One piece of work. `is_named`: its id comes from the client's key, so it may be known."""

    generation: Generation
    terms: JobTerms
    is_named: bool


async def read_order(services: Services, request: Request) -> JobOrder:
    """A job as its body and headers ask for it.

    Raises:
        RequestRefused: any of its subclasses.
    """
    key = _idempotency_key(request)

    def build(body: dict[str, Any], caller: Caller) -> JobOrder:
        job_id = None if key is None else _named_id(AnswerKind.JOB, caller.tenant, key)
        digest = "" if key is None else _digest(body)
        webhook = _webhook(body.pop("webhook", None), services.settings)
        generation = services.models.build(AnswerKind.JOB, body, caller, job_id)
        terms = JobTerms(digest, is_listed=True, webhook=webhook, card=card_of(generation.tools))
        return JobOrder(generation, terms, key is not None)

    return await services.read(request, build)


async def submit_order(
    services: Services, request: Request, order: JobOrder
) -> RequestStatus | None:
    """Charge for the work and queue it; where the same order was taken before, where it stands.

    Raises:
        KeyReused: the id belongs to another order.
        RateLimited, QuotaTooSmall, Overloaded, StoreUnavailable: nothing was queued.
    """
    job_id = order.generation.answer_id
    earlier = await services.client.status(job_id) if order.is_named else None
    if earlier is None:
        await services.charge(request, order.generation)
        try:
            await submit_all(services.client, order.generation.as_job(order.terms))
        except RequestExists:  # the same call on another connection was faster
            earlier = await services.client.status(job_id)
    if earlier is not None and earlier.body_digest != order.terms.body_digest:
        raise KeyReused
    return earlier


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get(KEY_HEADER)
    if key is None:
        return None
    if not 1 <= len(key) <= MAX_KEY_CHARS or not (key.isascii() and key.isprintable()):
        message = f"{KEY_HEADER} must be 1 to {MAX_KEY_CHARS} printable ASCII characters."
        raise InvalidField(KEY_HEADER, message)
    return key


class _WebhookBody(BaseModel):
    model_config = Strict

    url: str
    secret: Annotated[str, Field(min_length=MIN_SECRET_CHARS, max_length=MAX_SECRET_CHARS)]


def _webhook(value: object, settings: GatewaySettings) -> str:
    """What a body says of whom to tell, for the ledger; "" where it says nothing."""
    if value is None:
        return ""
    if not isinstance(value, dict):
        raise InvalidField("webhook", "webhook must be an object of url and secret.")
    parsed = validate(_WebhookBody, value, within="webhook")
    check_url(parsed.url, allows_private=settings.webhook_private)
    return Webhook(url=parsed.url, secret=SecretStr(parsed.secret)).encode()


def _named_id(kind: AnswerKind, tenant: str, key: str) -> str:
    """The same for every gateway; of another tenant's key, another one."""
    text = _TAG + f"{kind}\0{tenant}\0{key}".encode()
    return f"{kind}-{hashlib.sha256(text).hexdigest()[:32]}"


def _digest(body: Mapping[str, Any]) -> str:
    """Equal for bodies that say the same, whatever the order of their fields."""
    return hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]
