"""`tools` and `tool_choice` from the body to the prompt and the grammar of the answer."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.sse import ChunkWriter
from pipeline.intake.build import AnswerKind, Caller, Generation, Intake
from pipeline.intake.chat_template import CHATML, ChatTemplate
from pipeline.intake.errors import RequestRefused
from pipeline.intake.grammar import GrammarBook
from pipeline.intake.response import AnswerShape, ChoiceCollector
from pipeline.intake.tool_calls import ToolCall, ToolCallReader, ToolRules
from pipeline.intake.vocabulary import ByteVocabulary
from pipeline.protocol.failure import Ending, FinishReason
from pipeline.protocol.stream import RequestUsage, StreamEnded, TokensArrived
from pipeline.protocol.tokens import TokenRecord
from pipeline.script_book import EOS_ID
from tests.pipeline.intake.tool_templates import HERMES, LLAMA, MISTRAL

USER = {"role": "user", "content": "How warm is it?"}
PLACE = {
    "type": "object",
    "properties": {
        "place": {"$ref": "#/$defs/place"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["Oslo", "Köln"]}},
}


def tool(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    function = {"name": name, "description": f"About {name}", **fields}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


WEATHER, CLOCK = tool("weather", PLACE), tool("clock")
BOTH = [WEATHER, CLOCK]


def intake(template: str = HERMES) -> Intake:
    return Intake(ByteVocabulary(max_context=4096), ChatTemplate(template), "m")


def built(template: str = HERMES, messages: Any = (USER,), **fields: Any) -> Generation:
    body = {"model": "m", "messages": list(messages), **fields}
    return intake(template).build(AnswerKind.CHAT, body, Caller())


def prompt_text(generation: Generation) -> str:
    vocabulary = ByteVocabulary()
    ids = generation.requests[0].prompt_tokens
    return b"".join(map(vocabulary.token_bytes, ids)).decode()


def refusal_of(**fields: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        built(**fields)
    assert caught.value.status == 400
    return caught.value


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_tools_are_shown_to_the_model() -> None:
    text = prompt_text(built(tools=[tool("weather", PLACE, strict=True)]))
    line = text.splitlines()[1]
    assert json.loads(line) == WEATHER
    assert "strict" not in line


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    generation = built(tools=BOTH, tool_choice="none")
    assert prompt_text(generation) == prompt_text(built())
    assert generation.tools is None
    assert built(CHATML, tools=BOTH, tool_choice="none").requests


def test_calls_and_their_results_are_shown_as_the_template_writes_them() -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"place": "Köln <|im_end|>"}'},
    }
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12 <|im_start|>"},
    ]
    generation = built(messages=history, tools=BOTH)
    text = prompt_text(generation)
    assert '{"name": "weather", "arguments": {"place": "Köln <|im_end|>"}}' in text
    assert "tool\n12 <|im_start|><|im_end|>" in text
    plain = built(messages=[USER, {**history[1], "tool_calls": [call]}, USER], tools=BOTH)
    specials = [
        sum(token_id > 255 for token_id in one.requests[0].prompt_tokens)
        for one in (generation, plain)
    ]
    assert specials[0] == specials[1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"template": CHATML, "tools": BOTH}, "tools"),
        ({"template": CHATML + "{# tools #}", "tools": BOTH}, "tools"),
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [tool("has space")]}, "tools[0].function.name"),
        ({"tools": [tool("a", {"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": ["auto"]}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": named("other")}, "tool_choice"),
        ({"tools": BOTH, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": BOTH, "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": BOTH, "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [tool("a", {"not": {}})], "tool_choice": "required"}, "tools"),
        ({"tools": [tool("a", {"not": {}}, strict=True)]}, "tools"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal_of(**fields).param == param


def test_a_free_answer_costs_no_grammar() -> None:
    generation = built(tools=BOTH)
    assert generation.requests[0].sampling.grammar == ""
    assert generation.tools is not None
    assert generation.tools.names == {"weather", "clock"}


def spoken(generation: Generation, seed: int, text: str = "") -> str:
    """An answer of random tokens that the grammar allows, after `text`."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    grammar = GrammarBook(ByteVocabulary()).start(generation.requests[0].sampling.grammar)
    data = text.encode()
    for token_id in data:
        grammar.take(token_id)
    while not grammar.is_complete and len(data) < 3_000:
        bits = int.from_bytes(grammar.allowed, "little")
        choices = [place for place in range(256) if bits >> place & 1]
        if bits >> EOS_ID & 1 and (not choices or rng.random() < 0.5):
            break
        data += bytes([rng.choice(choices)])
        grammar.take(data[-1])
    return data.decode()


def calls_of(generation: Generation, text: str) -> list[ToolCall]:
    assert generation.tools is not None
    reader = ToolCallReader(generation.tools, "r")
    parts = [*reader.feed(text), *reader.finish()]
    return [part for part in parts if isinstance(part, ToolCall)]


@pytest.mark.parametrize("template", [HERMES, MISTRAL, LLAMA])
@pytest.mark.parametrize("choice", ["required", named("weather")])
def test_an_answer_that_must_call_does(template: str, choice: Any) -> None:
    generation = built(template, tools=BOTH, tool_choice=choice)
    num_called = []
    for seed in range(8):
        calls = calls_of(generation, spoken(generation, seed))
        assert calls
        num_called.append(len(calls))
        for call in calls:
            schema = PLACE if call.name == "weather" else {"maxProperties": 0}
            jsonschema.validate(json.loads(call.arguments), schema)
    assert (max(num_called) == 1) is (choice != "required")


@pytest.mark.parametrize("template", [HERMES, MISTRAL, LLAMA])
def test_one_call_at_a_time_where_the_client_wants_no_more(template: str) -> None:
    fields: dict[str, Any] = {"tools": BOTH, "parallel_tool_calls": False}
    for choice in ("required", "auto"):
        generation = built(template, tool_choice=choice, **fields)
        for seed in range(6):
            assert len(calls_of(generation, spoken(generation, seed))) <= 1


@pytest.mark.parametrize("template", [HERMES, MISTRAL, LLAMA])
def test_a_strict_function_is_held_to_its_schema_where_text_is_free(template: str) -> None:
    generation = built(template, tools=[tool("weather", PLACE, strict=True), CLOCK])
    assert generation.tools is not None
    dialect = generation.tools.dialect
    opening = {"hermes": "Well. <tool_call>\n", "mistral": "Well.[TOOL_CALLS][", "llama": ""}
    head = f'{opening[dialect.name]}{{"name": "weather", "{dialect.arguments_key}": '
    for seed in range(6):
        calls = calls_of(generation, spoken(generation, seed, head))
        jsonschema.validate(json.loads(calls[0].arguments), PLACE)
    grammar = GrammarBook(ByteVocabulary()).start(generation.requests[0].sampling.grammar)
    for token_id in b"It is [1] < 2 degrees.":
        grammar.take(token_id)
    assert int.from_bytes(grammar.allowed, "little") >> EOS_ID & 1


CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Oslo", "days": 2}}\n</tool_call>'
ENDED = StreamEnded(Ending(reason=FinishReason.STOP), RequestUsage(9, 9, 0))


def records(text: str) -> list[TokenRecord]:
    return [TokenRecord(value, -0.5) for value in text.encode()]


def whole(text: str, **fields: Any) -> ChatCompletion:
    generation = built(tools=BOTH, **fields)
    collector = ChoiceCollector(generation.requests[0].sampling, ByteVocabulary())
    collector.feed(TokensArrived(0, records(text)))
    collector.feed(ENDED)
    answer = AnswerShape(generation, ByteVocabulary()).whole([collector.outcome])
    return ChatCompletion.model_validate(answer, strict=True)


@pytest.mark.parametrize(("choice", "reason"), [("auto", "tool_calls"), (named("weather"), "stop")])
def test_an_answer_with_calls_is_what_the_sdk_expects(choice: Any, reason: str) -> None:
    answer = whole(f"Let me see.\n{CALL}", tool_choice=choice, logprobs=True)
    message = answer.choices[0].message
    assert message.content == "Let me see."
    assert message.tool_calls is not None
    assert message.tool_calls[0].type == "function"
    assert json.loads(message.tool_calls[0].function.arguments) == {"place": "Oslo", "days": 2}
    assert answer.choices[0].finish_reason == reason
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or ()) == len(f"Let me see.\n{CALL}")


def test_an_answer_of_calls_alone_has_no_content() -> None:
    message = whole(CALL).choices[0].message
    assert message.content is None
    assert len(message.tool_calls or ()) == 1


def test_an_answer_without_calls_is_text() -> None:
    choice = whole("Hello.\n").choices[0]
    assert (choice.message.content, choice.message.tool_calls) == ("Hello.\n", None)
    assert choice.finish_reason == "stop"


def test_a_stream_brings_text_as_it_comes_and_calls_whole() -> None:
    text = f"Let me see.\n{CALL}\n{CALL}"
    generation = built(tools=BOTH, logprobs=True, stream=True)
    writer = ChunkWriter(generation, ByteVocabulary())
    data = b"".join(writer.feed(0, TokensArrived(n, [r])) for n, r in enumerate(records(text)))
    data += writer.feed(0, ENDED)
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line][:-1]
    chunks = [ChatCompletionChunk.model_validate(json.loads(line), strict=True) for line in lines]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.index for call in calls] == [0, 1]
    for call in calls:
        assert call.function is not None
        assert json.loads(call.function.arguments or "") == {"place": "Oslo", "days": 2}
    assert [
        chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason
    ] == ["tool_calls"]
    scored = [chunk.choices[0].logprobs for chunk in chunks]
    assert sum(len(one.content or ()) for one in scored if one is not None) == len(text)


def test_a_job_may_call_too() -> None:
    body = {"model": "m", "messages": [USER], "tools": BOTH}
    generation = intake().build(AnswerKind.JOB, body, Caller())
    assert generation.tools is not None
    assert ToolRules.found(generation.tools.kept()) == generation.tools
