"""What a key may spend in a window, counted in a real Redis by all gateways together."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gateway.http_errors import QuotaTooSmall, RateLimited
from gateway.rate_limits import NO_LIMITS, KeyLimits, RateLimiter
from pipeline.errors import StoreUnavailable

FEW = KeyLimits.parse(["requests=3/10s", "tokens=100/60s"])


@pytest.fixture
async def limiters(redis_url: str) -> AsyncIterator[list[RateLimiter]]:
    limiters = [RateLimiter(redis_url) for _ in range(2)]
    yield limiters
    for limiter in limiters:
        await limiter.close()


async def test_two_gateways_share_a_window(limiters: list[RateLimiter]) -> None:
    one, two = limiters
    await one.spend_request(FEW, "k1")
    await two.spend_request(FEW, "k1")
    await one.spend_request(FEW, "k1")

    with pytest.raises(RateLimited) as refused:
        await two.spend_request(FEW, "k1")
    await two.spend_request(FEW, "k2")

    assert refused.value.status == 429
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.retry_after_s is not None
    assert 1 <= refused.value.retry_after_s <= 10


async def test_tokens_are_counted_by_their_number(limiters: list[RateLimiter]) -> None:
    await limiters[0].spend_tokens(FEW, "k1", 60)
    with pytest.raises(RateLimited):
        await limiters[1].spend_tokens(FEW, "k1", 41)
    await limiters[1].spend_tokens(FEW, "k1", 40)


async def test_what_no_window_can_hold_is_not_to_be_tried_again(
    limiters: list[RateLimiter],
) -> None:
    with pytest.raises(QuotaTooSmall) as refused:
        await limiters[0].spend_tokens(FEW, "k1", 101)
    assert refused.value.should_retry is False


async def test_a_key_without_limits_asks_nobody() -> None:
    limiter = RateLimiter("redis://127.0.0.1:1/0")
    await limiter.spend_request(NO_LIMITS, "k1")
    await limiter.spend_tokens(NO_LIMITS, "k1", 10**9)
    with pytest.raises(StoreUnavailable):
        await limiter.spend_request(FEW, "k1")
    await limiter.close()
