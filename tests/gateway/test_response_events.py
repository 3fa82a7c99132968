"""The events of a response, on the writer alone: the same at every reading, and the same as the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.response_events import ResponseWriter
from gateway.response_object import ResponseHead
from pipeline.intake.responses_body import ResponseCard
from pipeline.intake.tool_calls import ToolRules
from pipeline.intake.tool_dialects import HERMES
from pipeline.intake.vocabulary import ByteVocabulary
from pipeline.protocol.failure import Ending, FinishReason
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.stream import RequestUsage, StreamEnded, TokensArrived
from pipeline.protocol.tokens import TokenRecord

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TEXT = f"Let me see.{CALL}{CALL}Done."
USAGE = RequestUsage(5, 9, 0)
STOP = Ending(FinishReason.STOP)
RULES = ToolRules(HERMES, frozenset({"f"}))


def head(rules: ToolRules | None = RULES) -> ResponseHead:
    return ResponseHead("resp_1", "m", 0, ResponseCard().reading(rules), is_stored=True)


def read(
    text: str, after: int = -1, rules: ToolRules | None = RULES, ending: Ending = STOP
) -> list[dict[str, Any]]:
    writer = ResponseWriter(head(rules), ByteVocabulary(), SamplingParams(max_tokens=999), after)
    data = writer.begin()
    data += writer.feed(0, TokensArrived(0, [TokenRecord(byte) for byte in text.encode()]))
    data += writer.feed(0, StreamEnded(ending, USAGE))
    lines = [line for line in data.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_calls_stand_between_messages_as_they_came() -> None:
    events = read(TEXT)
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == [
        "message", "function_call", "function_call", "message",
    ]  # fmt: skip
    assert len({item["id"] for item in output}) == 4
    assert output[1]["call_id"] != output[2]["call_id"]
    assert output[1]["arguments"] == '{"a": 1}'
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    arguments = [
        e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"
    ]
    assert arguments == ['{"a": 1}'] * 2


@pytest.mark.parametrize("text", [TEXT, CALL, "", "plain"])
@pytest.mark.parametrize("rules", [RULES, None])
def test_the_stream_ends_with_what_the_whole_answer_is(text: str, rules: ToolRules | None) -> None:
    for ending in (STOP, Ending(FinishReason.CANCELLED), Ending(FinishReason.LENGTH)):
        last = read(text, rules=rules, ending=ending)[-1]
        assert last["response"] == head(rules).ended(text, ending, USAGE)


@pytest.mark.parametrize("rules", [RULES, None])
def test_a_stream_is_resumed_behind_any_event(rules: ToolRules | None) -> None:
    whole = read(TEXT, rules=rules)
    numbers = [event["sequence_number"] for event in whole]
    assert numbers == sorted(set(numbers))
    for rank, number in enumerate(numbers):
        assert read(TEXT, number, rules) == whole[rank + 1 :]


def test_without_tools_a_token_has_the_number_behind_the_opening() -> None:
    events = read("abc", rules=None)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [event["sequence_number"] for event in deltas] == [4, 5, 6]


def test_an_answer_that_says_nothing_is_an_empty_message() -> None:
    (item,) = read("")[-1]["response"]["output"]
    assert (item["type"], item["status"], item["content"][0]["text"]) == (
        "message",
        "completed",
        "",
    )
