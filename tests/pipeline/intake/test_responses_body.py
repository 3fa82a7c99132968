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
from pipeline.intake.tool_calls import ToolRules
from pipeline.intake.tool_dialects import HERMES

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


def test_calls_and_what_they_gave_are_messages_of_a_chat() -> None:
    call = {"type": "function_call", "id": "fc_1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "output": [{"type": "input_text", "text": "12"}]}
    items = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Let me see."},
        call | {"call_id": "a"},
        call | {"call_id": "b"},
        output | {"call_id": "a"},
        output | {"call_id": "b"},
        call | {"call_id": "c"},
    ]
    messages = parse_response(GOOD | {"input": items}).chat_body([])["messages"]
    assert [message["role"] for message in messages] == [
        "user", "assistant", "tool", "tool", "assistant",
    ]  # fmt: skip
    assert [made["id"] for made in messages[1]["tool_calls"]] == ["a", "b"]
    assert messages[1]["content"] == "Let me see."
    assert messages[2] == {"role": "tool", "tool_call_id": "a", "content": "12"}
    assert messages[4]["content"] is None


def test_tools_are_those_of_a_chat_one_level_deeper() -> None:
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": True, "description": None}
    fields = {"tools": [tool], "tool_choice": {"type": "function", "name": "f"}}
    order = parse_response(GOOD | fields)
    chat = order.chat_body([])
    function = {"name": "f", "parameters": {}, "strict": True}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert order.card.tools == [tool]
    assert "tools" not in parse_response(GOOD | {"tools": [], "tool_choice": "auto"}).chat


def test_a_card_comes_back_as_it_was() -> None:
    card = parse_response(GOOD | {"metadata": {"a": "b"}, "background": True}).card
    card = card.reading(ToolRules(HERMES, frozenset({"f"})))
    assert ResponseCard.model_validate_json(card.encode()) == card
    assert ResponseCard.model_validate_json(card.encode()).rules == card.rules


@pytest.mark.parametrize("text", ["x" * (MAX_CARD_BYTES + 1), "\u0001" * (MAX_CARD_BYTES // 2)])
def test_a_conversation_that_is_too_long_is_not_kept_but_the_rest_is(text: str) -> None:
    card = parse_response(GOOD | {"input": text, "metadata": {"a": "b"}}).card
    kept = ResponseCard.model_validate_json(card.encode())
    assert (kept.messages, kept.metadata) == (None, {"a": "b"})
    assert len(card.encode()) < 4096


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
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
        ("tools[0].function.name", "tools[0].name"),
    ],
)
def test_a_refusal_of_the_chat_is_told_in_the_names_of_the_response(there: str, here: str) -> None:
    refused: RequestRefused = renamed(InvalidField(there, f"{there} is wrong."))
    assert refused.param == here
