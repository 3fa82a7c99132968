"""/v1/responses by the stock client: whole, streamed, in the background, resumed, continued."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.flow.rig import Rig, wait_until
from tests.flow.wire import assert_error, num_requests, script, write_book

PATH = "/v1/responses"
KEYS = {"t1": "sk-one", "t2": "sk-two"}
SLOW = [f"{number} " for number in range(30)]
BOOK = {
    "café": script("caf", b"\xc3", b"\xa9", "!"),
    "slow": script(*SLOW, token_delay_ms=20),
    "endless": script("on ", ends=False, token_delay_ms=20),
}


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig], tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("responses")
    keys = folder / "keys"
    lines = [f"{name} {hashlib.sha256(key.encode()).hexdigest()}" for name, key in KEYS.items()]
    keys.write_text("\n".join(lines))
    env = {"POINTSMAN_GATEWAY_KEYS_FILE": str(keys)}
    return make_rig(engine="script", model=write_book(folder, BOOK), env=env)


def client_of(rig: Rig, tenant: str = "t1") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{rig.base_url}/v1", api_key=KEYS[tenant], timeout=30)


@pytest.fixture
def sdk(rig: Rig) -> Iterator[openai.OpenAI]:
    with client_of(rig) as client:
        yield client


def ended(sdk: openai.OpenAI, response_id: str) -> Response:
    def found() -> Response | None:
        response = sdk.responses.retrieve(response_id)
        return None if response.status in ("queued", "in_progress") else response

    response: Response = wait_until(found, 60)
    return response


def test_a_response_is_typed_and_kept(sdk: openai.OpenAI) -> None:
    raw = sdk.responses.with_raw_response.create(
        model="m", input="[[café]]", instructions="Be brief.", metadata={"a": "b"}, temperature=0
    )
    response = raw.parse()
    Response.model_validate_json(raw.text, strict=True)
    assert (response.status, response.output_text) == ("completed", "café!")
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert response.usage is not None
    assert response.usage.output_tokens == 4
    assert response.usage.total_tokens == response.usage.input_tokens + 4
    again = sdk.responses.retrieve(response.id)
    assert again.to_dict() | {"_request_id": ""} == response.to_dict() | {"_request_id": ""}


def test_input_may_be_messages_and_an_answer_may_be_cut(sdk: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "developer", "content": "x"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "[[slow]]"}],
        },
    ]
    response = sdk.responses.create(model="m", input=messages, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "0 1 2 "


def test_a_stream_has_the_events_that_the_helper_needs(sdk: openai.OpenAI) -> None:
    with sdk.responses.stream(model="m", input="[[café]]") as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "café!"
    assert final.output_text == "café!"


def test_background_work_is_asked_for_by_its_id(sdk: openai.OpenAI, rig: Rig) -> None:
    response = sdk.responses.create(model="m", input="[[slow]]", background=True)
    assert response.status == "queued"
    done = ended(sdk, response.id)
    assert (done.status, done.output_text) == ("completed", "".join(SLOW))
    with client_of(rig, "t2") as other, pytest.raises(openai.NotFoundError):
        other.responses.retrieve(response.id)
    sdk.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(response.id)


def test_background_work_is_cancelled_by_its_id(sdk: openai.OpenAI, rig: Rig) -> None:
    response = sdk.responses.create(model="m", input="[[endless]]", background=True)
    sdk.responses.cancel(response.id)
    assert ended(sdk, response.id).status == "cancelled"
    rig.wait_at_rest(30)
    foreground = sdk.responses.create(model="m", input="x")
    with pytest.raises(openai.BadRequestError):
        sdk.responses.cancel(foreground.id)


def test_a_background_stream_is_resumed_behind_the_last_event(sdk: openai.OpenAI) -> None:
    stream = sdk.responses.create(model="m", input="[[slow]]", background=True, stream=True)
    seen: list[Any] = []
    with stream:
        for event in stream:
            seen.append(event)
            if event.sequence_number >= 9:
                break
    response_id = seen[0].response.id
    with sdk.responses.retrieve(
        response_id, stream=True, starting_after=seen[-1].sequence_number
    ) as rest:
        seen += list(rest)
    with sdk.responses.retrieve(response_id, stream=True) as whole:
        unbroken = list(whole)

    numbers = [event.sequence_number for event in seen]
    assert numbers == sorted(set(numbers))
    assert numbers == [event.sequence_number for event in unbroken]
    deltas = [event.delta for event in seen if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "".join(SLOW)
    assert seen[-1].response.status == "completed"


async def test_a_foreground_stream_that_is_left_ends_at_the_workers(rig: Rig) -> None:
    async with openai.AsyncOpenAI(base_url=f"{rig.base_url}/v1", api_key=KEYS["t1"]) as sdk:
        stream = await sdk.responses.create(model="m", input="[[endless]]", stream=True)
        number = 0
        async for _ in stream:
            number += 1
            if number == 6:
                break
        await stream.close()
    await asyncio.to_thread(rig.wait_at_rest, 30)


def test_a_conversation_is_continued_without_its_instructions(sdk: openai.OpenAI, rig: Rig) -> None:
    first = sdk.responses.create(model="m", input="[[café]]", instructions="Only once.")
    second = sdk.responses.create(model="m", input="x", previous_response_id=first.id)
    third = sdk.responses.create(model="m", input="x", previous_response_id=second.id)
    messages = [
        {"role": "user", "content": "[[café]]"},
        {"role": "assistant", "content": "café!"},
        {"role": "user", "content": "x"},
    ]
    headers = {"authorization": f"Bearer {KEYS['t1']}"}
    body = {"model": "m", "messages": messages}
    counted = httpx.post(f"{rig.base_url}/tokenize", json=body, headers=headers).json()["count"]
    assert second.usage is not None
    assert third.usage is not None
    assert second.usage.input_tokens == counted
    assert third.usage.input_tokens > counted
    assert third.previous_response_id == second.id


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "reasoning"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"background": "yes"}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"input": "x" * 600}, "input"),
        ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"unknown": 1}, "unknown"),
    ],
)  # fmt: skip
async def test_what_is_not_supported_is_refused_by_its_name(
    rig: Rig, fields: dict[str, Any], param: str
) -> None:
    before = num_requests(rig)
    headers = {"authorization": f"Bearer {KEYS['t1']}"}
    async with httpx.AsyncClient(base_url=rig.base_url, headers=headers) as http:
        answer = await http.post(PATH, json={"model": "m", "input": "x"} | fields)
    assert_error(answer, 400, param=param)
    assert num_requests(rig) == before


async def test_an_unstored_response_is_answered_and_not_kept(rig: Rig, sdk: openai.OpenAI) -> None:
    response = sdk.responses.create(model="m", input="[[café]]", store=False)
    assert response.output_text == "café!"
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.responses.create(model="nope", input="x")
    assert unknown.value.code == "model_not_found"
