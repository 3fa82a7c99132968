"""Cases C008, C009, C014, C016, C017, C018, C020, C025, C027 on the writers alone."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

from gateway.sse import ChunkWriter, event_bytes, event_stream
from pipeline.errors import StoreUnavailable
from pipeline.intake.build import AnswerKind, Caller, Generation, Intake
from pipeline.intake.chat_template import CHATML, ChatTemplate
from pipeline.intake.vocabulary import ByteVocabulary
from pipeline.protocol.failure import Ending, FailureCode, FinishReason
from pipeline.protocol.stream import RequestUsage, StreamEnded, TokensArrived
from pipeline.protocol.tokens import TokenRecord
from pipeline.script_book import BASE_VOCAB_SIZE

Event = tuple[int, TokensArrived | StreamEnded]
WELL_FORMED = re.compile(rb"(data: \{.*\}\n\n)+data: \[DONE\]\n\n")
STOP = Ending(reason=FinishReason.STOP)
LENGTH = Ending(reason=FinishReason.LENGTH)


class Scene:
    """A generation whose tokens are the given pieces, in order."""

    def __init__(self, pieces: Sequence[bytes], kind: AnswerKind = AnswerKind.CHAT, **body: Any):
        self.vocabulary = ByteVocabulary(pieces)
        intake = Intake(self.vocabulary, ChatTemplate(CHATML), "m")
        asked = {"messages": [{"role": "user", "content": "x"}]}
        if kind is AnswerKind.COMPLETION:
            asked = {"prompt": "x"}  # type: ignore[dict-item]
        full = {"model": "m", "stream": True, **asked, **body}
        self.generation: Generation = intake.build(kind, full, Caller())
        self.writer = ChunkWriter(self.generation, self.vocabulary)
        self.num_tokens = len(pieces)

    def tokens(self, start: int, stop: int) -> TokensArrived:
        ids = range(BASE_VOCAB_SIZE + start, BASE_VOCAB_SIZE + stop)
        return TokensArrived(start, [TokenRecord(token_id, -0.5) for token_id in ids])

    def spoken(self, ending: Ending = STOP) -> list[bytes]:
        """What is written for each token alone, then for the ending."""
        writes = [
            self.writer.feed(0, self.tokens(rank, rank + 1)) for rank in range(self.num_tokens)
        ]
        return [*writes, self.writer.feed(0, ended(ending, self.num_tokens))]


def ended(ending: Ending, num_tokens: int) -> StreamEnded:
    return StreamEnded(ending, RequestUsage(7, num_tokens, 3))


def chunks_of(data: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def texts_of(chunks: Sequence[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def test_every_event_is_one_line_of_ascii_safe_json() -> None:
    nasty = "\n \r\n \u0085 \u2028 \u2029 data: [DONE] \n\ndata: {}"
    scene = Scene([nasty.encode()])
    data = b"".join(scene.spoken())
    assert WELL_FORMED.fullmatch(data)
    assert len(data.decode().splitlines()) == data.count(b"\n")
    assert b"\r" not in data
    assert texts_of(chunks_of(data)) == nasty


def test_an_event_without_id_has_nothing_but_data() -> None:
    assert event_bytes({"a": "é"}) == 'data: {"a":"é"}\n\n'.encode()


def test_the_role_comes_once_and_with_the_first_token() -> None:
    writes = Scene([b"aa", b"bb"]).spoken()
    first, second, last = (chunks_of(data) for data in writes)
    assert [chunk["choices"][0]["delta"] for chunk in first] == [
        {"role": "assistant", "content": ""},
        {"content": "aa"},
    ]
    assert [chunk["choices"][0]["delta"] for chunk in second] == [{"content": "bb"}]
    assert [chunk["choices"][0]["delta"] for chunk in last] == [{}]


def test_an_answer_without_tokens_still_has_role_and_finish() -> None:
    chunks = chunks_of(b"".join(Scene([]).spoken()))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {},
    ]


@pytest.mark.parametrize("ending", [STOP, LENGTH])
def test_a_stream_ends_with_one_finish_reason_and_one_done(ending: Ending) -> None:
    data = b"".join(Scene([b"aa", b"bb"]).spoken(ending))
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks_of(data)]
    assert reasons == [None, None, None, str(ending.reason)]
    assert data.count(b"[DONE]") == 1
    assert data.endswith(b"data: [DONE]\n\n")
    assert b'"usage"' not in data


def test_the_usage_chunk_comes_only_when_asked_for_and_has_no_choices() -> None:
    scene = Scene([b"aa", b"bb"], stream_options={"include_usage": True})
    *chunks, last = chunks_of(b"".join(scene.spoken()))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 7
    assert last["usage"]["completion_tokens"] == 2
    assert last["usage"]["total_tokens"] == 9
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_a_stop_string_leaves_no_chunk_and_no_trace() -> None:
    scene = Scene([b"Answer 42", b"\nOb", b"serv", b"ation: x"], stop=["\nObservation"])
    writes = scene.spoken()
    assert writes[1:4] == [b"", b"", b""]
    assert texts_of(chunks_of(b"".join(writes))) == "Answer 42"


def test_a_failed_stop_candidate_comes_with_the_token_that_fails_it() -> None:
    writes = Scene([b"aa", b"EN", b"DD"[:1] + b"I", b"VY"], stop=["ENDING"]).spoken()
    assert writes[1:3] == [b"", b""]
    assert texts_of(chunks_of(writes[3])) == "ENDIVY"


def test_text_held_to_the_end_comes_with_the_finish_chunk() -> None:
    *_, last = Scene([b"xx", b"EN"], stop=["ENDING"]).spoken()
    (chunk,) = chunks_of(last)
    assert chunk["choices"][0]["delta"] == {"content": "EN"}
    assert chunk["choices"][0]["finish_reason"] == "stop"


def test_all_tokens_at_hand_are_one_write_of_one_event_each() -> None:
    scene = Scene([b"aa", b"bb", b"cc"])
    assert len(chunks_of(scene.writer.feed(0, scene.tokens(0, 3)))) == 4


def test_three_choices_do_not_mix_and_count_the_prompt_once() -> None:
    pieces = [f"{rank:02}".encode() for rank in range(16)]
    scene = Scene(pieces, n=3, stream_options={"include_usage": True})
    spans = [(0, 2), (2, 7), (7, 16)]
    data = b""
    for rank in range(9):
        for index, (start, stop) in enumerate(spans):
            if start + rank < stop:
                data += scene.writer.feed(index, scene.tokens(start + rank, start + rank + 1))
            elif start + rank == stop:
                data += scene.writer.feed(index, ended(STOP, stop - start))
    data += scene.writer.feed(2, ended(STOP, 9))
    *chunks, last = chunks_of(data)
    for index, (start, stop) in enumerate(spans):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert texts_of(own, index) == b"".join(pieces[start:stop]).decode()
        assert sum("role" in chunk["choices"][0]["delta"] for chunk in own) == 1
        assert sum(chunk["choices"][0]["finish_reason"] is not None for chunk in own) == 1
    assert last["usage"]["completion_tokens"] == 16
    assert last["usage"]["prompt_tokens"] == 7
    assert data.count(b"[DONE]") == 1


def test_held_text_brings_the_logprobs_of_all_its_tokens() -> None:
    scene = Scene([b"Hello", b" !"], logprobs=True, stop=["Helloxxx"])
    chunks = chunks_of(b"".join(scene.spoken()))
    entries = [
        entry
        for chunk in chunks
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert "".join(entry["token"] for entry in entries) == texts_of(chunks) == "Hello !"
    assert all(entry["top_logprobs"] == [] for entry in entries)


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (FailureCode.WORKER_LOST, "worker_lost"),
        (FailureCode.DEADLINE_EXCEEDED, "timeout"),
        (FailureCode.INTERNAL_ERROR, "internal_error"),
    ],
)
def test_a_failed_stream_ends_with_an_error_event_and_done(failure: FailureCode, code: str) -> None:
    scene = Scene([b"aa"])
    data = b"".join(scene.spoken(Ending(failure=failure)))
    assert WELL_FORMED.fullmatch(data)
    *chunks, last = chunks_of(data)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", code)
    assert scene.writer.has_failed
    assert scene.writer.feed(0, scene.tokens(0, 1)) == b""


def test_a_cancelled_stream_never_shows_an_unknown_finish_reason() -> None:
    data = b"".join(Scene([b"aa"]).spoken(Ending(reason=FinishReason.CANCELLED)))
    assert chunks_of(data)[-1]["error"]["code"] == "cancelled"


def test_completions_have_text_and_no_role() -> None:
    data = b"".join(Scene([b"aa", b"bb"], AnswerKind.COMPLETION).spoken())
    chunks = chunks_of(data)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["aa", "bb", ""]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


async def test_a_pipeline_error_in_mid_stream_is_told_to_the_client() -> None:
    scene = Scene([b"aa"])

    async def events() -> AsyncGenerator[Event, None]:
        yield 0, scene.tokens(0, 1)
        raise StoreUnavailable("gone")

    data = b"".join([part async for part in event_stream(events(), scene.writer)])
    assert WELL_FORMED.fullmatch(data)
    assert chunks_of(data)[-1]["error"]["code"] == "store_unavailable"
