"""A job as JSON: where it stands, what it came to, and where its time went."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import orjson

from gateway.services import Services
from pipeline.intake.errors import refusal_of
from pipeline.intake.response import ChoiceCollector, usage_object
from pipeline.intake.run import follow_indexed
from pipeline.intake.tool_calls import ToolRules, split_calls
from pipeline.protocol.cache_use import CacheUse
from pipeline.protocol.failure import Ending
from pipeline.protocol.stream import RequestStatus


def stream_url(job_id: str) -> str:
    """Where its events are read."""
    return f"/v1/jobs/{job_id}/stream"


def job_object(status: RequestStatus) -> dict[str, Any]:
    """A job without its text."""
    ending = status.ending or Ending()
    refused = refusal_of(ending) if ending.failure is not None else None
    return {
        "id": status.request_id,
        "object": "job",
        "status": str(status.state),
        "model": status.model,
        "created": int(status.times.created_s),
        "stream_url": stream_url(status.request_id),
        "finish_reason": None if ending.reason is None else str(ending.reason),
        "error": None if refused is None else refused.body()["error"],
        "usage": usage_object(status.usage),
        "cache": _plain(status.cache_use),
        "resumed_cache": _plain(status.resumed_use),
        "timing": timing_object(status),
    }


async def text_of(services: Services, status: RequestStatus) -> str | None:
    """The answer of a job that has ended, else None.

    Raises:
        RequestUnknown: gone meanwhile.
        TokenizerUnusable: the model is not known any more.
    """
    if not status.state.is_final:
        return None
    vocabulary = await services.models.vocabulary(status.model)
    collector = ChoiceCollector(status.sampling, vocabulary)
    events = follow_indexed(services.client, status.request_id, 0, status.sampling)
    async with aclosing(events):
        async for _, event in events:
            collector.feed(event)
    return collector.outcome.text


def card_of(rules: ToolRules | None) -> str:
    """What is kept of a job beyond its tokens: how tool calls are read out of its text."""
    return "" if rules is None else orjson.dumps(rules.kept()).decode()


async def rules_of(services: Services, job_id: str) -> ToolRules | None:
    """The inverse, for a job that is there. Raises `StoreUnavailable`."""
    card = await services.client.card(job_id)
    return None if not card else ToolRules.found(orjson.loads(card))


async def answer_of(services: Services, status: RequestStatus) -> dict[str, Any]:
    """What a job came to: `text`, `tool_calls` if there are any, and the `finish_reason` then.

    Raises:
        RequestUnknown: gone meanwhile.
        TokenizerUnusable: the model is not known any more.
        StoreUnavailable: Redis is away.
    """
    text = await text_of(services, status)
    rules = None if text is None else await rules_of(services, status.request_id)
    if text is None or rules is None:
        return {"text": text}
    said, calls = split_calls(text, rules, status.request_id)
    if not calls:
        return {"text": said}
    reason = status.ending.reason if status.ending is not None else None
    return {
        "text": said,
        "tool_calls": [call.as_object() for call in calls],
        "finish_reason": None if reason is None else rules.reason(str(reason), len(calls)),
    }


def timing_object(status: RequestStatus) -> dict[str, Any]:
    """Durations in seconds; None where a point was not reached.

    queue: until a worker took it. prefill: from there to the first token. hand_over: from the prefill
    worker's hands into the decode worker's. first_token and total: from submission. tokens_per_s: from
    the first token to the end.
    """
    times = status.times
    decode_s = _between(times.first_token_s, times.ended_s)
    num_later = status.usage.completion_tokens - 1
    return {
        "queue_s": _between(times.created_s, times.claimed_s),
        "prefill_s": _between(times.claimed_s, times.first_token_s),
        "hand_over_s": _between(times.handed_s, times.resumed_s),
        "first_token_s": _between(times.created_s, times.first_token_s),
        "total_s": _between(times.created_s, times.ended_s),
        "tokens_per_s": round(num_later / decode_s, 3) if decode_s and num_later > 0 else None,
        "cached_tokens": status.usage.cached_tokens,
        # Without the part that differs from start to start.
        "workers": list(dict.fromkeys(name.partition("#")[0] for name in status.workers)),
        "attempts": status.attempt,
    }


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else round(end_s - start_s, 3)


def _plain(use: CacheUse | None) -> dict[str, Any] | None:
    return None if use is None else use.model_dump(mode="json")
