"""Case C166: what load generators do, in their own way of reading: nothing fails, the counts agree."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.flow.rig import Rig
from tests.flow.talk import client

NUM_REQUESTS, AT_ONCE, NUM_TOKENS = 100, 10, 12


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


@dataclass
class Measured:
    """What a load generator notes of one request."""

    header_s: float
    first_s: float
    total_s: float
    output_tokens: int
    prompt_tokens: int
    num_chunks: int


async def split_at_blank_lines(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Events of a stream, read by bytes: split at blank lines, without a word about SSE."""
    buffer = b""
    async for part in parts:
        buffer += part
        while b"\n\n" in buffer:
            event, buffer = buffer.split(b"\n\n", 1)
            yield event.decode()
    assert buffer == b""


async def bench(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Measured:
    began_s = time.perf_counter()
    headers = {"x-request-id": "the-same-for-all", "X-Correlation-ID": "c"}
    async with http.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        header_s = time.perf_counter() - began_s
        first_s = 0.0
        num_chunks = 0
        usage: dict[str, Any] = {}
        is_done = False
        async for event in split_at_blank_lines(answer.aiter_raw()):
            assert event.startswith("data: "), event
            data = event.removeprefix("data: ")
            is_done = data == "[DONE]"
            if is_done:
                continue
            chunk = json.loads(data)
            usage = chunk.get("usage") or usage
            if chunk["choices"]:
                first_s = first_s or time.perf_counter() - began_s
                num_chunks += 1
    assert is_done
    return Measured(
        header_s,
        first_s,
        time.perf_counter() - began_s,
        usage["completion_tokens"],
        usage["prompt_tokens"],
        num_chunks,
    )


def chat_request(number: int) -> dict[str, Any]:
    """As those write it who time chats: text parts, a fixed length, nulls where they have no opinion."""
    parts = [{"type": "text", "text": f"prompt {number}"}]
    return {
        "messages": [{"role": "user", "content": parts}],
        "max_completion_tokens": NUM_TOKENS,
        "stop": None,
        "logprobs": None,
    }


def completion_request(number: int) -> dict[str, Any]:
    """As those write it who time completions: token ids in place of text."""
    return {
        "prompt": [32 + (number + place) % 90 for place in range(20)],
        "max_tokens": NUM_TOKENS,
        "min_tokens": NUM_TOKENS,
        "repetition_penalty": 1.0,
        "temperature": 0.0,
        "logprobs": None,
    }


@pytest.mark.parametrize(
    ("path", "make"),
    [("/v1/chat/completions", chat_request), ("/v1/completions", completion_request)],
)
async def test_c166_a_hundred_requests_are_read_without_a_fault(
    rig: Rig, path: str, make: Callable[[int], dict[str, Any]]
) -> None:
    served = rig.metric('pointsman_gateway_tokens_total{kind="completion"')
    asked = rig.metric('pointsman_gateway_tokens_total{kind="prompt"')
    places = asyncio.Semaphore(AT_ONCE)
    async with client(rig) as http:
        assert (await http.get("/health")).is_success
        model = (await http.get("/v1/models")).json()["data"][0]["id"]

        async def one(number: int) -> Measured:
            body = {
                **make(number),
                "model": model,
                "stream": True,
                "ignore_eos": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
            async with places:
                return await bench(http, path, body)

        found = await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))
        assert (await http.get("/metrics")).is_success

    assert {item.output_tokens for item in found} == {NUM_TOKENS}
    now = rig.metric('pointsman_gateway_tokens_total{kind="completion"')
    assert now - served == sum(item.output_tokens for item in found)
    now = rig.metric('pointsman_gateway_tokens_total{kind="prompt"')
    assert now - asked == sum(item.prompt_tokens for item in found)
    for item in found:
        assert 0 < item.first_s <= item.total_s
        assert item.first_s != item.header_s
        assert item.num_chunks > 1
