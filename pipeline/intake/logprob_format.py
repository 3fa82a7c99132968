"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.intake.vocabulary import Vocabulary
from pipeline.protocol.tokens import TokenRecord

LEAST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI writes this


def chat_logprobs(tokens: Sequence[TokenRecord], vocabulary: Vocabulary) -> dict[str, Any]:
    """`choices[].logprobs` of chat: one entry per token."""
    return {
        "content": [
            {
                **_entry(vocabulary, record.token_id, record.logprob),
                "top_logprobs": [_entry(vocabulary, *pair) for pair in record.top],
            }
            for record in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokens: Sequence[TokenRecord], offsets: Sequence[int], vocabulary: Vocabulary
) -> dict[str, Any]:
    """`choices[].logprobs` of completions: parallel lists.

    `top_logprobs[i]` holds the most likely tokens and the chosen one; None when none were asked for.
    A token without a log-probability (the first of a prompt) has None in both.
    """
    has_top = any(record.top for record in tokens)
    return {
        "tokens": [token_text(vocabulary, record.token_id) for record in tokens],
        "token_logprobs": [
            None if record.logprob is None else _finite(record.logprob) for record in tokens
        ],
        "top_logprobs": [_top(vocabulary, record) for record in tokens] if has_top else None,
        "text_offset": list(offsets),
    }


def token_text(vocabulary: Vocabulary, token_id: int) -> str:
    """A token on its own; one that is no whole text is spelled in bytes, as OpenAI does."""
    data = vocabulary.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{value:02x}" for value in data)


def _top(vocabulary: Vocabulary, record: TokenRecord) -> dict[str, float] | None:
    if record.logprob is None:
        return None
    pairs = [*record.top, (record.token_id, record.logprob)]
    return {token_text(vocabulary, token_id): _finite(logprob) for token_id, logprob in pairs}


def _entry(vocabulary: Vocabulary, token_id: int, logprob: float | None) -> dict[str, Any]:
    return {
        "token": token_text(vocabulary, token_id),
        "logprob": _finite(logprob),
        "bytes": list(vocabulary.token_bytes(token_id)),
    }


def _finite(logprob: float | None) -> float:
    return LEAST_LOGPROB if logprob is None else max(logprob, LEAST_LOGPROB)
