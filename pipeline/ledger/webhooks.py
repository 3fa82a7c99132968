"""Whom to tell of the end of a job: a queue in the ledger, so that no gateway's death forgets it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import redis.asyncio
import structlog
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from pipeline.ledger.scripts import load_script
from pipeline.ledger.store import store_errors
from pipeline.protocol.request import RequestState

log = structlog.get_logger(__name__)

_FIELDS_EACH = 5


class Webhook(BaseModel):
    """Where to post, and the secret to sign with; goes from the ledger when it is done with."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: str
    secret: SecretStr

    def encode(self) -> str:
        """For the ledger, the secret in the clear."""
        return json.dumps({"url": self.url, "secret": self.secret.get_secret_value()})


@dataclass(frozen=True, slots=True)
class DueWebhook:
    """One that is due now. `num_tries` before this one; `ended_s` is Unix time."""

    job_id: str
    webhook: Webhook
    state: RequestState
    num_tries: int
    ended_s: int


class WebhookQueue:
    """All methods raise `StoreUnavailable` when Redis is away."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        # redis-py types script arguments narrower than it takes them.
        self._take: Any = client.register_script(load_script("take_webhooks"))
        self._settle: Any = client.register_script(load_script("settle_webhook"))

    async def take(self, limit: int, lease_ms: int) -> list[DueWebhook]:
        """At most `limit` that are due; each must be settled within its lease, or comes again.

        One that this build cannot read is left to those of another, with all its tries, until its job
        is forgotten.
        """
        with store_errors():
            reply = await self._take(keys=[], args=[limit, lease_ms])
        due = []
        for start in range(0, len(reply), _FIELDS_EACH):
            job_id = reply[start].decode()
            try:
                webhook = Webhook.model_validate_json(reply[start + 1])
            except ValidationError:
                log.warning("webhook_unreadable", request=job_id)
                await self._leave(job_id, lease_ms)
                continue
            state = RequestState(reply[start + 2].decode())
            num_tries, ended_ms = int(reply[start + 3]), int(reply[start + 4])
            due.append(DueWebhook(job_id, webhook, state, num_tries, ended_ms // 1000))
        return due

    async def _leave(self, job_id: str, delay_ms: int) -> None:
        with store_errors():
            await self._settle(keys=[], args=[job_id, delay_ms, 1])

    async def done(self, job_id: str) -> None:
        """It was delivered, or is given up."""
        with store_errors():
            await self._settle(keys=[], args=[job_id, ""])

    async def again(self, job_id: str, delay_ms: int) -> None:
        """It failed; try once more later."""
        with store_errors():
            await self._settle(keys=[], args=[job_id, delay_ms])
