"""What the routes are handed: one of each, made by the composition root."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from gateway.auth import KeyRing
from gateway.body import read_body
from gateway.drain import Drain
from gateway.metrics import GatewayMetrics
from gateway.rate_limits import RateLimiter
from gateway.settings import GatewaySettings
from pipeline.client import PipelineClient
from pipeline.intake.build import AnswerKind, Caller, Generation, Intake
from pipeline.intake.json_body import parse_json_object


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one gateway process. `started_s` is Unix time."""

    settings: GatewaySettings
    client: PipelineClient
    intake: Intake
    keys: KeyRing
    rates: RateLimiter
    metrics: GatewayMetrics
    drain: Drain
    encoding: ThreadPoolExecutor
    started_s: int

    def caller(self, request: Request) -> Caller:
        """Whose request this is. Raises `KeyRefused`."""
        return self.keys.caller(request.headers.get("authorization"))

    async def accept(self, kind: AnswerKind, request: Request) -> Generation:
        """Read, check and tokenize a request for new work, off the event loop.

        Raises:
            RequestRefused: any of its subclasses.
        """
        key = self.keys.find(request.headers.get("authorization"))
        caller = self.caller(request)
        self.drain.refuse_new_work()
        await self.rates.spend_request(key.limits, key.key_id)
        data = await read_body(request, self.settings.max_body_bytes)
        loop = asyncio.get_running_loop()
        generation = await loop.run_in_executor(self.encoding, self._build, kind, data, caller)
        num_tokens = sum(
            len(asked.prompt_tokens) + asked.sampling.max_tokens for asked in generation.requests
        )
        await self.rates.spend_tokens(key.limits, key.key_id, num_tokens)
        self.metrics.count_ignored(generation.ignored)
        return generation

    def _build(self, kind: AnswerKind, data: bytes, caller: Caller) -> Generation:
        body: Mapping[str, Any] = parse_json_object(data)
        return self.intake.build(kind, body, caller)
