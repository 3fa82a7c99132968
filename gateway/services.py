"""What the routes are handed: one of each, made by the composition root."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from gateway.auth import ApiKey, KeyRing
from gateway.body import BodyReader
from gateway.drain import Drain
from gateway.http_errors import RightMissing
from gateway.key_rights import Right
from gateway.keys_file import KeysFile
from gateway.metrics import GatewayMetrics
from gateway.rate_limits import RATE_HEADERS, RateLimiter, RateStanding
from gateway.settings import GatewaySettings
from pipeline.client import PipelineClient
from pipeline.intake.build import AnswerKind, Caller, Generation
from pipeline.intake.errors import UnsupportedField
from pipeline.intake.json_body import parse_json_object
from pipeline.intake.model_catalog import ModelCatalog
from pipeline.protocol.request import Priority

_Built = TypeVar("_Built")
_KEY = "api_key"  # in the state of an HTTP request: the key that sent it


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one gateway process. `started_s` is Unix time."""

    settings: GatewaySettings
    client: PipelineClient
    models: ModelCatalog
    keys_file: KeysFile
    rates: RateLimiter
    bodies: BodyReader
    metrics: GatewayMetrics
    drain: Drain
    encoding: ThreadPoolExecutor
    started_s: int

    @property
    def keys(self) -> KeyRing:
        """Who may call now."""
        return self.keys_file.ring

    def caller(self, request: Request) -> Caller:
        """Whose request this is. Raises `KeyRefused`."""
        return self._key(request).caller

    def batch_caller(self, request: Request) -> Caller:
        """Whose request this is, which only a key with the right `batch` may send.

        Raises:
            KeyRefused, RightMissing: it may not.
        """
        self._demand(request, Right.BATCH)
        return self.caller(request)

    def admit_scraper(self, request: Request) -> None:
        """See to it that a stranger does not read the metrics, which name models and nodes.

        Raises:
            KeyRefused, RightMissing: keys are needed here, and this one may not.
        """
        if self.settings.metrics_need_key and not self.keys.is_open:
            self._demand(request, Right.METRICS)

    def reach(self, request: Request) -> str | None:
        """Whose jobs and batches the key may read and cancel by id: a tenant's; None: everybody's.

        Raises:
            KeyRefused: see `caller`.
        """
        key = self._key(request)
        return None if Right.ADMIN in key.may.rights else key.tenant

    async def accept(self, kind: AnswerKind, request: Request) -> Generation:
        """Read, check and tokenize a request for new work, and charge its key for it.

        Raises:
            RequestRefused: any of its subclasses.
        """
        generation = await self.read(request, partial(self.models.build, kind))
        await self.charge(request, generation)
        return generation

    async def read(
        self, request: Request, build: Callable[[dict[str, Any], Caller], _Built]
    ) -> _Built:
        """What `build` makes of the body, off the event loop; counts as one request of the key.

        `build` may be called again, with the same body, when the model it needs has been loaded.

        Raises:
            RequestRefused: any of its subclasses.
        """
        key = self._key(request)
        self.drain.refuse_new_work()
        _tell(request, await self.rates.spend_request(key.limits, key.key_id))
        async with self.bodies.read(request) as data:

            def parse_and_build() -> _Built:
                return build(parse_json_object(data), key.caller)

            return await self.models.run(self.encoding, parse_and_build)

    async def build(
        self, kind: AnswerKind, body: dict[str, Any], caller: Caller, answer_id: str
    ) -> Generation:
        """Check and tokenize a body that we made, off the event loop. Raises `RequestRefused`."""
        make = partial(self.models.build, kind, body, caller, answer_id)
        return await self.models.run(self.encoding, make)

    async def charge(self, request: Request, generation: Generation) -> None:
        """Take a generation's tokens, all that it may come to, from what its key has left.

        Raises:
            UnsupportedField: a field was passed over where that is not allowed.
            RightMissing: the priority `batch` takes a right that the key lacks.
            RateLimited, QuotaTooSmall, StoreUnavailable: see `RateLimiter.spend_tokens`.
        """
        if generation.ignored and self.settings.strict_fields:
            raise UnsupportedField(generation.ignored[0])
        if any(asked.priority is Priority.BATCH for asked in generation.requests):
            self._demand(request, Right.BATCH)
        key = self._key(request)
        num_tokens = sum(
            len(asked.prompt_tokens) + asked.sampling.max_tokens for asked in generation.requests
        )
        _tell(request, await self.rates.spend_tokens(key.limits, key.key_id, num_tokens))
        self.metrics.count_ignored(generation.ignored)

    def _key(self, request: Request) -> ApiKey:
        """Found once for a request: a look compares with every key there is."""
        state = request.scope.setdefault("state", {})
        if _KEY not in state:
            state[_KEY] = self.keys.find(request.headers.get("authorization"))
        found: ApiKey = state[_KEY]
        return found

    def _demand(self, request: Request, right: Right) -> None:
        if right not in self._key(request).may.rights:
            raise RightMissing(right)


def _tell(request: Request, standing: RateStanding | None) -> None:
    """Let the answer's headers say what is left."""
    if standing is not None:
        headers = request.scope.setdefault("state", {}).setdefault(RATE_HEADERS, {})
        headers.update(standing.headers())
