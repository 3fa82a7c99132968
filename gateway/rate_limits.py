"""Requests and tokens per window, for each API key; shared by all gateways, counted in Redis.

The counting is the library `limits`: a sliding window made of two fixed ones, one script call a look.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from typing import Self

from limits import RateLimitItem, RateLimitItemPerSecond
from limits.aio.storage import RedisStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from limits.errors import StorageError

from gateway.http_errors import QuotaTooSmall, RateLimited
from pipeline.errors import StoreUnavailable
from pipeline.ledger.store import connect_async

_RULE = re.compile(r"(?P<what>requests|tokens)=(?P<count>[1-9]\d*)/(?P<window_s>[1-9]\d*)s")
MAX_CONNECTIONS = 8
RATE_HEADERS = "rate_headers"  # in the state of an HTTP request: what its answer says of the limits


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may spend: requests, and tokens (prompt and the answer that is asked for)."""

    requests: RateLimitItem | None = None
    tokens: RateLimitItem | None = None

    @classmethod
    def parse(cls, rules: list[str]) -> Self:
        """From `requests=COUNT/SECONDSs` and `tokens=COUNT/SECONDSs`, each at most once.

        Raises:
            ValueError: a rule is neither, or comes twice.
        """
        found: dict[str, RateLimitItem] = {}
        for rule in rules:
            match = _RULE.fullmatch(rule)
            if match is None or match["what"] in found:
                raise ValueError(f"not a limit: {rule}")
            found[match["what"]] = RateLimitItemPerSecond(
                int(match["count"]), int(match["window_s"]), namespace=match["what"]
            )
        return cls(found.get("requests"), found.get("tokens"))


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class RateStanding:
    """What a key has left of one limit; `reset_s` seconds from now the window is a new one."""

    what: str
    limit: int
    remaining: int
    reset_s: int

    def headers(self) -> dict[str, str]:
        """In OpenAI's words."""
        return {
            f"x-ratelimit-limit-{self.what}": str(self.limit),
            f"x-ratelimit-remaining-{self.what}": str(self.remaining),
            f"x-ratelimit-reset-{self.what}": f"{self.reset_s}s",
        }


class RateLimiter:
    """Spends what keys have. A key is named by the digest of itself, never by itself."""

    def __init__(self, redis_url: str) -> None:
        """Connects when first asked. `redis_url` is redis, rediss or unix."""
        self._client = connect_async(redis_url, max_connections=MAX_CONNECTIONS)
        storage = RedisStorage(
            "async+redis://",
            wrap_exceptions=True,
            implementation="redispy",
            connection_pool=self._client.connection_pool,  # type: ignore[arg-type]
        )
        self._limiter = SlidingWindowCounterRateLimiter(storage)

    async def spend_request(self, limits: KeyLimits, key_id: str) -> RateStanding | None:
        """Count one request; None: there is no limit.

        Raises:
            RateLimited: the window is full.
            StoreUnavailable: Redis does not answer.
        """
        if limits.requests is None:
            return None
        return await self._spend(limits.requests, key_id, 1)

    async def spend_tokens(
        self, limits: KeyLimits, key_id: str, num_tokens: int
    ) -> RateStanding | None:
        """Count tokens; None: there is no limit.

        Raises:
            QuotaTooSmall: not even an empty window has so many.
            RateLimited: the window has not enough left.
            StoreUnavailable: Redis does not answer.
        """
        if limits.tokens is None:
            return None
        if num_tokens > limits.tokens.amount:
            raise QuotaTooSmall(limits.tokens.amount, num_tokens)
        return await self._spend(limits.tokens, key_id, num_tokens)

    async def _spend(self, item: RateLimitItem, key_id: str, count: int) -> RateStanding:
        try:
            is_spent = await self._limiter.hit(item, key_id, cost=count)
            window = await self._limiter.get_window_stats(item, key_id)
        except StorageError as error:
            raise StoreUnavailable(f"{type(error).__name__}: {error}") from error
        # Both clocks are this host's: the storage tells the reset from the time that Redis has left.
        wait_s = max(0, math.ceil(window.reset_time - time.time()))
        standing = RateStanding(item.namespace, item.amount, max(0, window.remaining), wait_s)
        if not is_spent:
            raise RateLimited(item.namespace, str(item), wait_s, standing.headers())
        return standing

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
