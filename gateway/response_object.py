"""A response of /v1/responses as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.response_items import output_of
from pipeline.intake.errors import refusal_of
from pipeline.intake.responses_body import ResponseCard
from pipeline.protocol.failure import Ending, FinishReason
from pipeline.protocol.stream import RequestUsage

PREFIX = "resp_"


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What does not change while the answer grows. `created_s` is Unix time."""

    response_id: str
    model: str
    created_s: int
    card: ResponseCard
    is_stored: bool

    def unfinished(self, status: str) -> dict[str, Any]:
        """The response while it is `queued` or `in_progress`."""
        return self._object(status, None, [], None)

    def ended(self, text: str, ending: Ending, usage: RequestUsage) -> dict[str, Any]:
        """The response at its end, however it ended."""
        status = status_of(ending)
        output = output_of(self.response_id, self.card.rules, text, status)
        return self._object(status, ending, output, usage)

    def _object(
        self,
        status: str,
        ending: Ending | None,
        output: list[dict[str, Any]],
        usage: RequestUsage | None,
    ) -> dict[str, Any]:
        card = self.card
        is_cut = status == "incomplete"
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "background": card.is_background,
            "error": None if ending is None else _error(ending),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": card.instructions,
            "max_output_tokens": card.max_output_tokens,
            "metadata": card.metadata,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": card.parallel_tool_calls,
            "previous_response_id": card.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": card.service_tier or "default",
            "store": self.is_stored,
            "temperature": card.temperature,
            "text": card.text,
            "tool_choice": card.tool_choice,
            "tools": card.tools,
            "top_p": card.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }


def status_of(ending: Ending) -> str:
    """completed, incomplete, cancelled or failed."""
    if ending.failure is not None:
        return "failed"
    if ending.reason is FinishReason.CANCELLED:
        return "cancelled"
    return "incomplete" if ending.reason is FinishReason.LENGTH else "completed"


def _error(ending: Ending) -> dict[str, str] | None:
    """Clients know few codes here: the real one is in the message."""
    refused = refusal_of(ending) if ending.failure is not None else None
    if refused is None:
        return None
    return {"code": "server_error", "message": f"{refused.code}: {refused.message}"}


def _usage(usage: RequestUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
