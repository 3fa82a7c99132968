"""Section STREAM of the cases: text whole and in order, stop strings unseen, events byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any

import pytest
from openai.types.chat import ChatCompletionTokenLogprob

from tests.flow.rig import Rig
from tests.flow.talk import JobReading, body, client, complete, submit_job
from tests.flow.wire import (
    CHAT,
    COMPLETIONS,
    WireStream,
    assert_error,
    chat,
    chat_body,
    chat_stream,
    num_tokens_run,
    script,
    wire_stream,
    write_book,
)

FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
BYTES = [bytes([value]) for value in FAMILY.encode()]
SPLITTERS = ("a\n", "\r\n", "\x85", "\u2028", "\u2029", "data: [DONE]", "\n\ndata: {}", "\x00z")
USAGE = {"stream_options": {"include_usage": True}}
FOREVER = {"ends": False}
BOOK = {
    "c001": script("caf", b"\xc3", b"\xa9", "!"),
    "c002": script(*BYTES, " ok"),
    "c005": script("ok ", b"\xff", " more"),
    "c005-cut": script("ok ", b"\xe2", b"\x82", " more"),
    "c005-end": script("ok ", b"\xf0", b"\x9f"),
    "c007": script(" ", "leading"),
    "c008": script("Answer 42", "\nOb", "serv", "ation: x", " and on", **FOREVER),
    "c009": script("a", "EN", "D", "IVY"),
    "c009-end": script("a", "EN", "D"),
    "c016": script("one", " two", " three"),
    "c017": script("slow", " start", prefill_delay_ms=2000),
    "c018": script(*"abcdefghij", logprob=-0.6),
    "c020": script("Hello", " !"),
    "c020-high": script("caf", b"\xc3", b"\xa9", " ol", "e", logprob=-2.0),
    "c025": script(*SPLITTERS),
}


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig], tmp_path_factory: pytest.TempPathFactory) -> Rig:
    book = write_book(tmp_path_factory.mktemp("book"), BOOK)
    return make_rig(engine="script", model=book)


async def every_way(rig: Rig, name: str, **fields: Any) -> list[str]:
    """The text of a script as chat and completion, streamed and whole, and as a job."""
    prompt = f"[[{name}]]"
    async with client(rig) as http:
        fields = {"max_tokens": 64} | fields
        job = JobReading(await submit_job(http, prompt, **fields))
        await job.read_through(http)
        return [
            (await chat_stream(http, prompt, **fields)).text(),
            (await chat(http, prompt, **fields))["choices"][0]["message"]["content"],
            (await wire_stream(http, COMPLETIONS, body(prompt, **fields))).text(),
            (await complete(http, prompt, **fields))["choices"][0]["text"],
            job.text,
        ]


async def test_c001_a_character_over_two_tokens_is_held_until_it_is_whole(rig: Rig) -> None:
    async with client(rig) as http:
        wire = await chat_stream(http, "[[c001]]", **USAGE)

    assert wire.pieces() == ["caf", "é", "!"]
    assert wire.usage()["completion_tokens"] == 4
    assert await every_way(rig, "c001") == ["café!"] * 5


async def test_c002_only_whole_code_points_reach_the_client(rig: Rig) -> None:
    async with client(rig) as http:
        wire = await chat_stream(http, "[[c002]]", **USAGE)

    assert wire.pieces() == [*FAMILY, " ok"]
    assert "".join(wire.pieces()).encode() == FAMILY.encode() + b" ok"
    assert b"\\ud8" not in wire.data.lower()
    assert wire.usage()["completion_tokens"] == len(BYTES) + 1
    assert await every_way(rig, "c002") == [FAMILY + " ok"] * 5


@pytest.mark.parametrize("name", ["c005", "c005-cut"])
async def test_c005_a_bad_byte_is_one_mark_and_the_stream_goes_on(rig: Rig, name: str) -> None:
    async with client(rig) as http:
        wire = await chat_stream(http, f"[[{name}]]")

    assert wire.text() == "ok \ufffd more"
    assert wire.finish_reason() == "stop"
    assert wire.choices()[-1]["delta"] == {}, "nothing was held to the end"
    assert await every_way(rig, name) == ["ok \ufffd more"] * 5


async def test_c005_half_a_character_at_the_end_is_one_mark(rig: Rig) -> None:
    assert await every_way(rig, "c005-end") == ["ok \ufffd"] * 5


async def test_c007_a_leading_space_is_neither_lost_nor_doubled(rig: Rig) -> None:
    async with client(rig) as http:
        wire = await chat_stream(http, "[[c007]]")

    assert wire.pieces() == [" ", "leading"]
    assert await every_way(rig, "c007") == [" leading"] * 5


async def test_c008_a_stop_string_over_three_tokens_never_leaks(rig: Rig) -> None:
    stop = "\nObservation"
    before = num_tokens_run(rig)
    async with client(rig) as http:
        fields = {"stop": [stop], "max_tokens": 200}
        wire = await chat_stream(http, "[[c008]]", **fields, **USAGE)

    assert wire.pieces() == ["Answer 42"]
    assert wire.finish_reason() == "stop"
    usage = wire.usage()
    assert usage["completion_tokens"] == 4
    rig.wait_at_rest()
    assert num_tokens_run(rig) - before <= usage["prompt_tokens"] + 4
    assert await every_way(rig, "c008", **fields) == ["Answer 42"] * 5
    assert await every_way(rig, "c001", stop=["é!"]) == ["caf"] * 5
    assert await every_way(rig, "c002", stop=[FAMILY[1:]]) == [FAMILY[0]] * 5


async def test_c009_text_that_was_no_stop_string_is_let_go_at_once(rig: Rig) -> None:
    async with client(rig) as http:
        wire = await chat_stream(http, "[[c009]]", stop=["ENDING"])
        held = await chat_stream(http, "[[c009-end]]", stop=["ENDING"])

    assert wire.pieces() == ["a", "ENDIVY"]
    assert wire.finish_reason() == "stop"
    assert held.pieces() == ["a", "END"]
    assert held.choices()[-1]["delta"] == {"content": "END"}
    assert await every_way(rig, "c009", stop=["ENDING"]) == ["aENDIVY"] * 5
    assert await every_way(rig, "c009-end", stop=["ENDING"]) == ["aEND"] * 5


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_c014_usage_comes_only_when_asked_and_last(rig: Rig, path: str) -> None:
    request = chat_body("[[c016]]") if path == CHAT else body("[[c016]]")
    async with client(rig) as http:
        plain = await wire_stream(http, path, request)
        off = await wire_stream(http, path, request | {"stream_options": {"include_usage": False}})
        asked = await wire_stream(http, path, request | USAGE)
        whole = (await http.post(path, json=request)).json()["usage"]

    for chunk in plain.chunks + off.chunks:
        assert len(chunk["choices"]) == 1
        assert "usage" not in chunk
    assert all(len(chunk["choices"]) == 1 for chunk in asked.chunks[:-1])
    assert {repr(chunk["usage"]) for chunk in asked.chunks[:-1]} == {"None"}
    usage = asked.usage()
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert {key: usage[key] for key in counts} == {key: whole[key] for key in counts}
    assert set(usage) == set(whole)


ENDINGS = [
    ("stop", {}, "one two three"),
    ("length", {"max_tokens": 2}, "one two"),
    ("length", {"max_tokens": 1}, "one"),
    ("stop", {"stop": [" th"]}, "one two"),
    ("stop", {"stop": [" th"], "max_tokens": 3}, "one two"),
    ("length", {"stop": [" three!"], "max_tokens": 3}, "one two three"),
    ("stop", {"stop": ["zzz", "ee", " three"]}, "one two"),
    ("stop", {"stop": "o"}, ""),
]


@pytest.mark.parametrize(("reason", "fields", "text"), ENDINGS)
@pytest.mark.parametrize("usage", [{}, USAGE], ids=["plain", "usage"])
def test_c016_a_stream_ends_in_order_and_its_connection_goes_on(
    rig: Rig, reason: str, fields: dict[str, Any], text: str, usage: dict[str, Any]
) -> None:
    connection = HTTPConnection("127.0.0.1", rig.port, timeout=10)
    request = json.dumps(chat_body("[[c016]]", stream=True, **fields, **usage))
    headers = {"Content-Type": "application/json"}
    sockets = set()
    for _ in range(2):
        connection.request("POST", CHAT, request, headers)
        sockets.add(connection.sock)
        answer = connection.getresponse()
        wire = WireStream(answer.headers, answer.read())  # type: ignore[arg-type]

        parts = wire.choices()
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert wire.finish_reason() == reason
        assert wire.text() == text
        assert all(part["delta"] for part in parts[:-1])
        assert wire.data.count(b"[DONE]") == 1
        assert len(wire.chunks) == len(parts) + bool(usage)
        assert len({(c["id"], c["created"], c["model"]) for c in wire.chunks}) == 1
        assert {chunk["object"] for chunk in wire.chunks} == {"chat.completion.chunk"}
    assert len(sockets) == 1, "the connection was used again"
    connection.close()


async def test_c017_the_role_chunk_comes_with_the_first_token_and_once(rig: Rig) -> None:
    async with client(rig) as http:
        wire = await chat_stream(http, "[[c017]]")

    first, *later = wire.choices()
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in part["delta"] for part in later)
    first_s, num_bytes = wire.arrivals[0]
    assert first_s >= 2.0
    assert b"slow" in wire.data[:num_bytes], "the role did not come before the token"


STRAY_IDS = [i for i in range(256) if chr(i) not in "abcdefghij"]


async def test_c018_three_choices_are_not_mixed(rig: Rig) -> None:
    """Sampled off the script, a choice ends by a stop token: lengths differ from seed to seed."""
    fields = {"temperature": 1, "stop_token_ids": STRAY_IDS, "max_tokens": 40}
    async with client(rig) as http:

        async def lone(seed: int) -> dict[str, Any]:
            return await chat(http, "[[c018]]", seed=seed, **fields)

        seed = 0
        answers: list[dict[str, Any]] = []
        while len({a["usage"]["completion_tokens"] for a in answers}) < 3:
            seed += 3
            answers = [await lone(seed + choice) for choice in range(3)]
        texts = [answer["choices"][0]["message"]["content"] for answer in answers]
        lengths = [answer["usage"]["completion_tokens"] for answer in answers]
        wire = await chat_stream(http, "[[c018]]", n=3, seed=seed, **fields, **USAGE)
        whole = await chat(http, "[[c018]]", n=3, seed=seed, **fields)

    assert [wire.text(index) for index in range(3)] == texts
    assert [choice["message"]["content"] for choice in whole["choices"]] == texts
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    for index in range(3):
        roles = [part["delta"].get("role") for part in wire.choices(index)]
        assert roles[0] == "assistant"
        assert roles[1:] == [None] * (len(roles) - 1)
        assert wire.finish_reason(index) == answers[index]["choices"][0]["finish_reason"]
    for usage in (wire.usage(), whole["usage"]):
        assert usage["completion_tokens"] == sum(lengths)
        assert usage["prompt_tokens"] == answers[0]["usage"]["prompt_tokens"]


def entries(wire: WireStream) -> list[tuple[str, list[dict[str, Any]]]]:
    """(text, log-probability entries) of every chunk that has text."""
    return [
        (part["delta"]["content"], part["logprobs"]["content"])
        for part in wire.choices()
        if part["delta"].get("content")
    ]


async def test_c020_logprobs_come_with_the_text_they_stand_for(rig: Rig) -> None:
    async with client(rig) as http:
        wire = await chat_stream(http, "[[c020]]", logprobs=True, top_logprobs=2, stop=["Helloxxx"])
        whole = await chat(http, "[[c020]]", logprobs=True, top_logprobs=2, stop=["Helloxxx"])

    shown = entries(wire)
    assert [(text, [e["token"] for e in some]) for text, some in shown] == [
        ("Hello !", ["Hello", " !"])
    ]
    assert whole["choices"][0]["logprobs"]["content"] == shown[0][1]


async def test_c020_the_entry_is_that_of_the_sampled_token(rig: Rig) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "temperature": 2, "max_tokens": 30}
    num_off = 0
    async with client(rig) as http:
        for seed in range(4):
            wire = await chat_stream(http, "[[c020-high]]", seed=seed, **fields)
            shown = entries(wire)
            every = [entry for _, some in shown for entry in some]
            data = b"".join(bytes(entry["bytes"]) for entry in every)
            assert data.decode("utf-8", "replace") == wire.text()
            assert all(len(entry["top_logprobs"]) == 2 for entry in every)
            for entry in every:
                best = entry["top_logprobs"][0]
                assert entry["logprob"] <= best["logprob"]
                num_off += entry["bytes"] != best["bytes"]
            whole = await chat(http, "[[c020-high]]", seed=seed, **fields)
            assert whole["choices"][0]["message"]["content"] == wire.text()
            assert whole["choices"][0]["logprobs"]["content"] == every
    assert num_off > 0, "some token was not the most likely one"


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 0}], ids=["absent", "zero"])
async def test_c023_logprobs_alone_have_empty_alternatives(
    rig: Rig, fields: dict[str, int]
) -> None:
    async with client(rig) as http:
        answer = await chat(http, "[[c001]]", logprobs=True, **fields)
        refused = await http.post(CHAT, json=chat_body("x", top_logprobs=2))

    every = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in every] == ["caf", "bytes:\\xc3", "bytes:\\xa9", "!"]
    for entry in every:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["top_logprobs"] == []
        ChatCompletionTokenLogprob.model_validate(entry, strict=True)
    assert_error(refused, 400, param="top_logprobs")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_c025_an_event_is_one_line_whatever_the_text_holds(rig: Rig, path: str) -> None:
    request = chat_body("[[c025]]") if path == CHAT else body("[[c025]]")
    async with client(rig) as http:
        wire = await wire_stream(http, path, request | USAGE)
        async with http.stream("POST", path, json=request | {"stream": True}) as answer:
            lines = [line async for line in answer.aiter_lines() if line]

    assert wire.pieces() == list(SPLITTERS)
    assert wire.headers["content-type"].startswith("text/event-stream")
    assert not any(byte in wire.data for byte in (b"\r", b"\xc2\x85", b"\xe2\x80"))
    assert all(line.startswith("data: ") for line in lines), "line readers see whole events"
