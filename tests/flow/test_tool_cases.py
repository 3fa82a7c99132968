"""Tool calls through a whole pipeline, as the SDK sees them. Case C055 for a model without tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pytest

from tests.flow.rig import Rig
from tests.flow.talk import client
from tests.flow.wire import CHAT, chat, chat_body, refused, script, write_book
from tests.pipeline.intake.tool_templates import HERMES

ARGUMENTS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "How warm it will be", "parameters": ARGUMENTS},
}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
CALL = ("<tool", "_call>\n", '{"name": "weather", ', '"arguments": {"city": "Oslo", "days": 2}}')


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig], tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("tools")
    template = folder / "tools.jinja"
    template.write_text(HERMES)
    scripts = {
        "calls": script("Let me ", "see.\n", *CALL, "\n</tool_call>\n", *CALL, "\n</tool_call>"),
        "chats": script("No ", "tool ", "needed."),
    }
    book = write_book(folder, scripts, context_tokens=4096)
    env = {"POINTSMAN_CHAT_TEMPLATE": str(template)}
    workers = {"prefill-0": "prefill", "decode-0": "decode"}
    return make_rig(engine="script", model=book, env=env, workers=workers)


def sdk(rig: Rig) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{rig.base_url}/v1", api_key="k", max_retries=0, timeout=30)


def asked(content: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "m", "messages": messages, "tools": [WEATHER], "temperature": 0, **fields}


def test_calls_come_whole_and_streamed_alike(rig: Rig) -> None:
    with sdk(rig) as api:
        answer = api.chat.completions.create(**asked("[[calls]]"))
        chunks = list(api.chat.completions.create(**asked("[[calls]]", stream=True)))
    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == ("Let me see.", "tool_calls")
    whole = [call.function.arguments for call in message.tool_calls or ()]
    assert [json.loads(text) for text in whole] == [{"city": "Oslo", "days": 2}] * 2
    deltas = [chunk.choices[0].delta for chunk in chunks]
    streamed = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.function and call.function.arguments for call in streamed] == whole
    assert len({call.id for call in streamed}) == 2
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_conversation_with_results_goes_on(rig: Rig) -> None:
    with sdk(rig) as api:
        first = api.chat.completions.create(**asked("[[calls]]")).choices[0].message
        calls = first.tool_calls or []
        messages: list[Any] = [
            {"role": "user", "content": "Is it warm?"},
            first,
            *({"role": "tool", "tool_call_id": c.id, "content": "12 [[chats]]"} for c in calls),
        ]
        answer = api.chat.completions.create(model="m", messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == "No tool needed."
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_model_that_would_rather_chat_must_call(rig: Rig, choice: Any) -> None:
    fields = {"tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
    with sdk(rig) as api:
        answer = api.chat.completions.create(**asked("[[chats]]", **fields))
    assert answer.choices[0].message.content is None
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), ARGUMENTS)


async def test_no_tools_no_calls(rig: Rig) -> None:
    fields = {"tools": [WEATHER], "tool_choice": "none"}
    async with client(rig) as http:
        held = await chat(http, "[[calls]]", **fields)
        plain = await chat(http, "[[calls]]")
    assert held["choices"] == plain["choices"]
    assert "<tool_call>" in held["choices"][0]["message"]["content"]


async def test_c055_what_cannot_be_done_never_reaches_the_queue(rig: Rig) -> None:
    await refused(rig, CHAT, chat_body("x", tool_choice="required"), "tool_choice")
    broken = {"type": "function", "function": {"name": "x", "parameters": {"not": {}}}}
    body = chat_body("x", tools=[broken], tool_choice="required")
    await refused(rig, CHAT, body, "tools")
