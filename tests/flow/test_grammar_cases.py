"""Constrained answers through a whole pipeline: held over hand-over, kill and every option."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from tests.flow.rig import Rig, wait_until
from tests.flow.talk import client
from tests.flow.wire import CHAT, chat, chat_body, chat_stream, refused

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "names": {
            "type": "array",
            "items": {"type": "string", "maxLength": 12},
            "minItems": 4,
            "maxItems": 8,
        },
        "kind": {"enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["names", "kind", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "list", "strict": True, "schema": SCHEMA}}
HELD = {"response_format": FORMAT, "max_tokens": 300}
WARM = {"temperature": 1, "seed": 7}


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    workers = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    return make_rig(workers=workers, env={"POINTSMAN_WORKER_STEP_DELAY_MS": "10"})


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def assert_held(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("fields", [{}, WARM, {**WARM, "top_k": 40, "presence_penalty": 1}])
async def test_an_answer_is_what_the_schema_says(rig: Rig, fields: dict[str, Any]) -> None:
    async with client(rig) as http:
        whole, streamed = await asyncio.gather(
            chat(http, "a list", **HELD, **fields),
            chat_stream(http, "a list", **HELD, **fields),
        )
    assert_held(text_of(whole))
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert (streamed.text(), streamed.finish_reason()) == (text_of(whole), "stop")


async def test_answers_of_one_batch_do_not_disturb_each_other(rig: Rig) -> None:
    async with client(rig) as http:
        alone = [text_of(await chat(http, f"{n}", max_tokens=60)) for n in range(3)]
        free = [chat(http, f"{n}", max_tokens=60) for n in range(3)]
        held = [chat(http, f"{n}", **HELD, **WARM) for n in range(5)]
        answers = await asyncio.gather(*free, *held)
    assert [text_of(answer) for answer in answers[:3]] == alone
    for answer in answers[3:]:
        assert_held(text_of(answer))


async def test_choices_differ_and_each_is_held(rig: Rig) -> None:
    async with client(rig) as http:
        answer = await chat(http, "four lists", n=4, **HELD, **WARM)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 4
    for text in texts:
        assert_held(text)


async def test_log_probabilities_come_with_every_token(rig: Rig) -> None:
    async with client(rig) as http:
        answer = await chat(http, "a list", logprobs=True, top_logprobs=2, **HELD)
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == text_of(answer)
    assert len(content) == answer["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


async def test_limits_and_stop_strings_cut_as_ever(rig: Rig) -> None:
    async with client(rig) as http:
        whole = text_of(await chat(http, "a list", **HELD))
        short = await chat(http, "a list", **{**HELD, "max_tokens": 9})
        stopped = await chat(http, "a list", stop='"kind"', **HELD)
    assert short["choices"][0]["finish_reason"] == "length"
    assert whole.startswith(text_of(short))
    assert text_of(stopped) == whole.partition('"kind"')[0]
    assert stopped["choices"][0]["finish_reason"] == "stop"


def num_running(rig: Rig, worker: str) -> int:
    return sum(rig.redis.scard(key) for key in rig.redis.scan_iter(f"running:{worker}@*"))


async def test_a_killed_worker_changes_no_constrained_answer(rig: Rig) -> None:
    async with client(rig) as http:
        expected = [text_of(await chat(http, f"kill {n}", **HELD, **WARM)) for n in range(6)]
        running = [
            asyncio.create_task(chat_stream(http, f"kill {n}", **HELD, **WARM)) for n in range(6)
        ]
        await asyncio.to_thread(wait_until, lambda: num_running(rig, "decode-0"))
        rig.kill("decode-0")
        streams = await asyncio.gather(*running)
    assert [one.text() for one in streams] == expected
    assert {one.finish_reason() for one in streams} == {"stop"}


@pytest.mark.parametrize(
    "schema", [{"not": {}}, {"type": "nothing"}, {"enum": ["x" * 70_000]}, {"$ref": "file:///x"}]
)
async def test_a_schema_that_cannot_be_held_never_reaches_the_queue(
    rig: Rig, schema: dict[str, Any]
) -> None:
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    await refused(rig, CHAT, chat_body("x", response_format=given), "response_format")
