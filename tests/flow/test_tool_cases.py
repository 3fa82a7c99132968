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


FLAT: Any = {"type": "function"} | WEATHER["function"]


def test_a_response_has_calls_as_items_and_goes_on_with_what_they_gave(rig: Rig) -> None:
    with sdk(rig) as api:
        first = api.responses.create(model="m", input="[[calls]]", tools=[FLAT])
        again = api.responses.retrieve(first.id)
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "12 [[chats]]"}
            for item in first.output
            if item.type == "function_call"
        ]
        second = api.responses.create(
            model="m", input=outputs, tools=[FLAT], previous_response_id=first.id
        )
        by_hand = [{"role": "user", "content": "[[calls]]"}, *first.output, *outputs]
        third = api.responses.create(model="m", input=by_hand, tools=[FLAT])
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    assert first.output_text == "Let me see."
    assert first.status == "completed"
    assert again.output == first.output
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Oslo", "days": 2}] * 2
    assert len({call.call_id for call in calls}) == 2
    assert second.output_text == third.output_text == "No tool needed."
    assert second.usage is not None
    assert third.usage is not None
    assert second.usage.input_tokens == third.usage.input_tokens, "one conversation, told twice"


def test_a_response_with_calls_is_streamed_and_resumed(rig: Rig) -> None:
    with sdk(rig) as api:
        with api.responses.stream(
            model="m", input="[[calls]]", tools=[FLAT], background=True
        ) as stream:
            events = list(stream)
            final = stream.get_final_response()
        begun = next(e for e in events if e.type == "response.output_item.added" and e.output_index)
        with api.responses.retrieve(
            final.id, stream=True, starting_after=begun.sequence_number
        ) as rest:
            resumed = list(rest)
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [{"city": "Oslo", "days": 2}] * 2
    assert [event.sequence_number for event in resumed] == [
        event.sequence_number for event in events if event.sequence_number > begun.sequence_number
    ]
    last = resumed[-1]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output] == [item.type for item in final.output]


def test_a_response_must_call_where_it_is_told_to(rig: Rig) -> None:
    choice: Any = {"type": "function", "name": "weather"}
    with sdk(rig) as api:
        answer = api.responses.create(
            model="m", input="[[chats]]", tools=[FLAT], tool_choice=choice, temperature=0,
            parallel_tool_calls=False, max_output_tokens=200,
        )  # fmt: skip
    (call,) = answer.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), ARGUMENTS)
    assert answer.tool_choice.model_dump() == choice  # type: ignore[union-attr]


async def test_a_job_has_its_calls_whole_and_streamed(rig: Rig) -> None:
    async with client(rig) as http:
        job_id = (await http.post("/v1/jobs", json=asked("[[calls]]"))).json()["id"]
        events = (await http.get(f"/v1/jobs/{job_id}/stream")).text.split("\n\n")
        job = (await http.get(f"/v1/jobs/{job_id}")).json()
    told = [json.loads(event.partition("data: ")[2]) for event in events if "id: " in event]
    assert (job["text"], job["finish_reason"]) == ("Let me see.", "tool_calls")
    calls = [json.loads(call["function"]["arguments"]) for call in job["tool_calls"]]
    assert calls == [{"city": "Oslo", "days": 2}] * 2
    streamed = [call for event in told for call in event.get("tool_calls", ())]
    assert [call["id"] for call in streamed] == [call["id"] for call in job["tool_calls"]]
    assert "".join(event["text"] for event in told) == "Let me see."
    assert told[-1]["finish_reason"] == "tool_calls"


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
