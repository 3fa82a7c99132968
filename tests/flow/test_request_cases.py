"""Section VALID of the cases: which values are taken, which are refused, and what they become."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.flow.rig import Rig
from tests.flow.talk import body, client, complete, stream, text_of
from tests.flow.wire import (
    CHAT,
    COMPLETIONS,
    assert_error,
    chat,
    chat_body,
    refused,
)

CONTEXT = 512
VOCABULARY = 260
BOS = 256
JSON = {"content-type": "application/json"}
MIB = 2**20


@pytest.fixture(scope="module")
def pipeline(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(workers={"both-0": "both"}, has_kvd=False)


@pytest.fixture
def rig(pipeline: Rig) -> Iterator[Rig]:
    """The pipeline, which must serve as before when the test has ended."""
    yield pipeline
    answer = httpx.post(pipeline.base_url + COMPLETIONS, json=body("alive", max_tokens=3))
    assert answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("max_tokens", [0, -1])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_c031_max_tokens_below_one_is_refused(rig: Rig, path: str, max_tokens: int) -> None:
    request = chat_body("x") if path == CHAT else body("x")
    await refused(rig, path, request | {"max_tokens": max_tokens}, "max_tokens")


async def test_c031_a_huge_max_tokens_exceeds_the_context(rig: Rig) -> None:
    error = await refused(rig, CHAT, chat_body("x", max_tokens=999_999_999), "messages")
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT) in error["message"]
    assert "999999999" in error["message"]


@pytest.mark.parametrize("prompt", [[65] * (CONTEXT + 1), "A" * (CONTEXT + 1), "A" * CONTEXT])
async def test_c032_a_prompt_that_leaves_no_room_is_refused_at_once(rig: Rig, prompt: Any) -> None:
    started_s = time.monotonic()
    error = await refused(rig, COMPLETIONS, {"model": "m", "prompt": prompt}, "prompt")
    assert error["code"] == "context_length_exceeded"
    error = await refused(rig, CHAT, chat_body("A" * CONTEXT), "messages")
    assert error["code"] == "context_length_exceeded"
    assert time.monotonic() - started_s < 1.0


async def test_c032_a_prompt_one_short_of_the_context_gets_one_token(rig: Rig) -> None:
    async with client(rig) as http:
        answer = await complete(http, [65] * (CONTEXT - 1))
        streamed = await stream(http, "A" * (CONTEXT - 1))

    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == streamed.finish_reason == "length"
    assert answer["choices"][0]["text"] == streamed.text


@pytest.mark.parametrize("prompt", [[], [[]], [[65], []], ["a", []]])
async def test_c034_a_prompt_of_nothing_is_refused(rig: Rig, prompt: Any) -> None:
    await refused(rig, COMPLETIONS, body(prompt), "prompt")


async def test_c034_a_conversation_of_nothing_is_refused(rig: Rig) -> None:
    await refused(rig, CHAT, {"model": "m", "messages": []}, "messages")


async def test_c034_empty_text_starts_from_the_beginning_of_text(rig: Rig) -> None:
    async with client(rig) as http:
        expected = await text_of(http, [BOS], max_tokens=8)
        for prompt in ("", [""], None):
            answer = await asyncio.wait_for(complete(http, prompt, max_tokens=8), 5)
            assert answer["choices"][0]["text"] == expected
            assert answer["usage"]["prompt_tokens"] == 1
        assert (await chat(http, "", max_tokens=8))["usage"]["completion_tokens"] == 8


WRONG_IDS = [[1, 2, VOCABULARY], [-1], [5279552648203111001], [True], ["a", 1], [[1], [VOCABULARY]]]


@pytest.mark.parametrize("prompt", [*WRONG_IDS, [1.0], [[True]], [[1], "a"], {"a": 1}, 5, True])
async def test_c035_ids_outside_the_vocabulary_are_refused(rig: Rig, prompt: Any) -> None:
    await refused(rig, COMPLETIONS, body(prompt, max_tokens=4), "prompt")


LOOSE: list[tuple[str, Any]] = [
    ("max_tokens", True),
    ("max_tokens", "5"),
    ("max_tokens", 5.5),
    ("stream", "yes"),
    ("stream", 1),
    ("n", 1.5),
    ("n", True),
    ("temperature", "1"),
    ("temperature", False),
    ("top_p", "0.5"),
    ("top_k", 1.5),
    ("stop", 5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("ignore_eos", 1),
    ("logprobs", "yes"),
    ("user", 5),
    ("metadata", {"a": 5}),
    ("stop_token_ids", ["5"]),
]


@pytest.mark.parametrize(("field", "value"), LOOSE)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_c037_loose_types_are_not_coerced(
    rig: Rig, path: str, field: str, value: Any
) -> None:
    request = chat_body("x") if path == CHAT else body("x")
    await refused(rig, path, request | {field: value}, field)


async def test_c038_an_integral_float_counts_and_a_textual_boolean_does_not(rig: Rig) -> None:
    async with client(rig) as http:
        assert (await chat(http, "x", max_tokens=5.0))["usage"]["completion_tokens"] == 5
        assert (await chat(http, "x", max_tokens=2, stream=None))["object"] == "chat.completion"
    options = {"stream": True, "stream_options": {"include_usage": "true"}}
    await refused(rig, CHAT, chat_body("x", **options), "stream_options.include_usage")
    options = {"stream": True, "stream_options": {"include_usage": 1}}
    await refused(rig, COMPLETIONS, body("x", **options), "stream_options.include_usage")


NULL_IN_BOTH = dict.fromkeys(
    (
        *("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n", "stream", "logprobs"),
        *("stream_options", "logit_bias", "presence_penalty", "frequency_penalty", "user", "store"),
        *("metadata", "service_tier", "ignore_eos", "min_p", "min_tokens", "repetition_penalty"),
        *("best_of", "suffix", "echo", "safety_identifier", "prompt_cache_key"),
    )
)
NULL_IN_CHAT = NULL_IN_BOTH | dict.fromkeys(
    (
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "audio"),
        *("response_format", "max_completion_tokens", "top_logprobs", "modalities", "prediction"),
        *("reasoning_effort", "verbosity", "web_search_options"),
    )
)


async def test_c039_null_is_absent(rig: Rig) -> None:
    fixed = {"temperature": 0, "seed": 5, "max_tokens": 8}
    async with client(rig) as http:
        answer = await chat(http, "null", **NULL_IN_CHAT)
        assert answer["choices"][0]["finish_reason"] == "length"
        with_nulls = await chat(http, "null", **(NULL_IN_CHAT | fixed))
        without = await chat(http, "null", **fixed)
        assert with_nulls["choices"] == without["choices"]
        assert set(with_nulls) == set(without)
        answer = await complete(http, "null", **(NULL_IN_BOTH | fixed))
        assert answer["choices"] == (await complete(http, "null", **fixed))["choices"]


async def test_c040_a_seed_is_64_bits_and_decides(rig: Rig) -> None:
    async with client(rig) as http:

        async def sampled(seed: int) -> str:
            answer = await chat(http, "seed", temperature=1, max_tokens=24, seed=seed)
            text: str = answer["choices"][0]["message"]["content"]
            return text

        seeds = (-1, 0, 2**63 - 1, -(2**63))
        texts = [await sampled(seed) for seed in seeds]
        assert [await sampled(seed) for seed in seeds] == texts
        assert len(set(texts)) == len(seeds)


@pytest.mark.parametrize("seed", [b"9223372036854775808", b"1" + b"0" * 20, b'"7"', b"1.5"])
async def test_c040_another_seed_is_refused(rig: Rig, seed: bytes) -> None:
    content = b'{"model":"m","prompt":"x","seed":' + seed + b"}"
    async with client(rig) as http:
        answer = await http.post(COMPLETIONS, content=content, headers=JSON)
    assert_error(answer, 400, param="seed")


async def test_c042_temperature_0_and_top_p_0_are_greedy(rig: Rig) -> None:
    async with client(rig) as http:
        greedy: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 1e-9},
            {"temperature": 1, "top_p": 0},
            {"temperature": 2, "top_k": 1},
            {"temperature": 0, "top_p": 1},
        ]
        texts = [await text_of(http, "greedy", max_tokens=24, **fields) for fields in greedy]
    assert len(set(texts)) == 1


WRONG_SAMPLING: list[tuple[str, float]] = [
    ("top_p", 1.01),
    ("top_p", -0.1),
    ("temperature", 2.01),
    ("temperature", -0.1),
    ("top_k", -2),
]


@pytest.mark.parametrize(("field", "value"), WRONG_SAMPLING)
async def test_c042_sampling_out_of_range_is_refused(rig: Rig, field: str, value: float) -> None:
    await refused(rig, CHAT, chat_body("x", **{field: value}), field)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 1_000_000}, "n"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1_000_000}, "best_of"),
        ({"best_of": True}, "best_of"),
    ],
)
async def test_c043_too_many_choices_are_refused_at_once(
    rig: Rig, fields: dict[str, Any], param: str
) -> None:
    gateway = psutil.Process(rig.processes["gateway"].pid)
    before = gateway.memory_info().rss
    await refused(rig, COMPLETIONS, body("x", **fields), param)
    assert gateway.memory_info().rss - before < 10 * MIB


async def test_c043_two_greedy_choices_are_equal(rig: Rig) -> None:
    async with client(rig) as http:
        for fields in ({"n": 2}, {"n": 2, "best_of": 2}, {"best_of": 1}):
            answer = await complete(http, "twice", max_tokens=8, **fields)
            assert len({choice["text"] for choice in answer["choices"]}) == 1
            assert len(answer["choices"]) == fields.get("n", 1)


@pytest.mark.parametrize("fields", [{"stream": False}, {}, {"stream": None}])
async def test_c053_stream_options_need_a_stream(rig: Rig, fields: dict[str, Any]) -> None:
    for path, plain in ((CHAT, chat_body("x")), (COMPLETIONS, body("x"))):
        asking = {"stream_options": {"include_usage": True}}
        await refused(rig, path, plain | fields | asking, "stream_options")
        without = {"stream_options": None, "max_tokens": 2}
        async with client(rig) as http:
            answer = await http.post(path, json=plain | fields | without)
        assert answer.status_code == 200


async def test_c054_both_names_of_max_tokens_work_and_must_agree(rig: Rig) -> None:
    both = {"max_tokens": 5, "max_completion_tokens": 5}
    async with client(rig) as http:
        for fields in ({"max_tokens": 5}, {"max_completion_tokens": 5}, both):
            assert (await chat(http, "x", **fields))["usage"]["completion_tokens"] == 5
    error = await refused(rig, CHAT, chat_body("x", **(both | {"max_tokens": 6})), "max_tokens")
    assert "max_completion_tokens" in error["message"]


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
UNSUPPORTED: list[tuple[str, str, Any]] = [
    (CHAT, "tools", [TOOL]),
    (CHAT, "functions", [{"name": "f"}]),
    (CHAT, "audio", {"voice": "a", "format": "wav"}),
    (CHAT, "modalities", ["audio"]),
    (CHAT, "modalities", ["text", "audio"]),
    (CHAT, "store", True),
    (CHAT, "chat_template", "x"),
    (CHAT, "kv_transfer_params", {"a": 1}),
    (CHAT, "no_such_field", 0),
    (COMPLETIONS, "suffix", "x"),
    (CHAT, "echo", True),
    (COMPLETIONS, "prompt_embeds", "x"),
    (COMPLETIONS, "messages", []),
]


@pytest.mark.parametrize(("path", "field", "value"), UNSUPPORTED)
async def test_c055_what_would_change_the_answer_is_refused(
    rig: Rig, path: str, field: str, value: Any
) -> None:
    request = chat_body("x") if path == CHAT else body("x")
    error = await refused(rig, path, request | {field: value}, field)
    assert error["code"] == "unsupported_parameter"


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize("part", [PICTURE, {"type": "input_audio"}, {"type": "nonsense"}])
async def test_c055_a_part_that_is_no_text_is_refused(rig: Rig, part: dict[str, Any]) -> None:
    parts = [{"type": "text", "text": "a"}, part]
    error = await refused(rig, CHAT, chat_body(parts), "messages[0].content[1].type")
    assert error["code"] == "unsupported_parameter"


async def test_c055_values_that_change_nothing_are_taken(rig: Rig) -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "store": False,
    }
    async with client(rig) as http:
        answer = await chat(http, "neutral", max_tokens=8, **neutral)
        assert answer["choices"] == (await chat(http, "neutral", max_tokens=8))["choices"]
