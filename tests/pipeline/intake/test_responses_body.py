"""The text subset of /v1/responses as a chat: what is taken over, what is kept, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.intake.errors import InvalidField, RequestRefused, UnsupportedField
from pipeline.intake.responses_body import (
    MAX_CARD_BYTES,
    ResponseCard,
    parse_response,
    renamed,
)

GOOD: dict[str, Any] = {"model": "m", "input": "hi"}


def test_instructions_stand_before_the_history_and_are_not_kept_in_it() -> None:
    order = parse_response(GOOD | {"instructions": "Be brief."})
    earlier = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    contents = [message["content"] for message in order.chat_body(earlier)["messages"]]
    assert contents == ["Be brief.", "a", "b", "hi"]
    assert order.card.messages == [{"role": "user", "content": "hi"}]


def test_fields_of_a_chat_are_handed_on_under_the_chat_s_names() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    order = parse_response(
        GOOD | {"max_output_tokens": 5, "seed": 7, "text": {"format": schema}, "user": "u"}
    )
    chat = order.chat_body([])
    assert (chat["max_completion_tokens"], chat["seed"]) == (5, 7)
    assert chat["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}},
    }
    assert order.ignored == ("user",)
    assert "user" not in chat


def test_a_card_comes_back_as_it_was() -> None:
    card = parse_response(GOOD | {"metadata": {"a": "b"}, "background": True}).card
    assert ResponseCard.model_validate_json(card.encode()) == card


@pytest.mark.parametrize("text", ["x" * (MAX_CARD_BYTES + 1), "\u0001" * (MAX_CARD_BYTES // 2)])
def test_a_conversation_that_is_too_long_is_not_kept_but_the_rest_is(text: str) -> None:
    card = parse_response(GOOD | {"input": text, "metadata": {"a": "b"}}).card
    kept = ResponseCard.model_validate_json(card.encode())
    assert (kept.messages, kept.metadata) == (None, {"a": "b"})
    assert len(card.encode()) < 4096


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"include": ["x"]}, "include"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"store": False, "background": True}, "background"),
    ],
)  # fmt: skip
def test_what_has_no_place_in_a_chat_of_text_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises((InvalidField, UnsupportedField)) as refused:
        parse_response(GOOD | fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("messages[1].content", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format", "text.format"),
        ("temperature", "temperature"),
    ],
)
def test_a_refusal_of_the_chat_is_told_in_the_names_of_the_response(there: str, here: str) -> None:
    refused: RequestRefused = renamed(InvalidField(there, f"{there} is wrong."))
    assert refused.param == here
