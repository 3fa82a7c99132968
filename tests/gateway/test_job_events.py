"""Case C074 on the writer alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.job_events import JobWriter, resume_point
from pipeline.intake.errors import InvalidField
from pipeline.intake.tool_calls import ToolCallReader, ToolRules
from pipeline.intake.tool_dialects import HERMES
from pipeline.intake.vocabulary import ByteVocabulary
from pipeline.protocol.failure import Ending, FailureCode, FinishReason
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.stream import RequestUsage, StreamEnded, TokensArrived
from pipeline.protocol.tokens import TokenRecord

TEXT = "caf\u00e9 ENDIVY, EN"
USAGE = RequestUsage(5, len(TEXT.encode()), 0)


def read(after: int, ending: Ending | None = None) -> bytes:
    """A job of one token per byte of TEXT, read from an event on."""
    sampling = SamplingParams(max_tokens=100, stop=("ENDING",))
    writer = JobWriter(ByteVocabulary(), sampling, after)
    records = [TokenRecord(byte) for byte in TEXT.encode()]
    data = writer.feed(0, TokensArrived(0, records[:7])) + writer.feed(
        0, TokensArrived(7, records[7:])
    )
    return data + writer.feed(0, StreamEnded(ending or Ending(FinishReason.STOP), USAGE))


def events_of(data: bytes) -> list[tuple[int, dict[str, Any]]]:
    events = []
    for block in data.decode().removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
        head, line = block.split("\n")
        events.append((int(head.removeprefix("id: ")), json.loads(line.removeprefix("data: "))))
    return events


def test_a_job_stream_has_one_event_per_token_and_one_for_the_end() -> None:
    events = events_of(read(-1))
    assert [event_id for event_id, _ in events] == list(range(len(TEXT.encode()) + 1))
    assert all(event["index"] == event_id for event_id, event in events)
    assert "".join(event["text"] for _, event in events) == TEXT
    assert all("finish_reason" not in event for _, event in events[:-1])
    assert events[-1][1]["finish_reason"] == "stop"
    assert events[-1][1]["usage"]["completion_tokens"] == len(TEXT.encode())


@pytest.mark.parametrize("after", range(len(TEXT.encode()) + 1))
def test_a_resumed_stream_continues_exactly_after_the_last_event(after: int) -> None:
    whole, rest = events_of(read(-1)), events_of(read(after))
    assert rest == whole[after + 1 :]


def test_a_stream_resumed_after_its_last_event_is_only_done() -> None:
    assert read(len(TEXT.encode())) == b"data: [DONE]\n\n"


def test_a_cancelled_job_says_so() -> None:
    assert (
        events_of(read(-1, Ending(FinishReason.CANCELLED)))[-1][1]["finish_reason"] == "cancelled"
    )


def test_a_failed_job_ends_with_an_error_event() -> None:
    data = read(len(TEXT), Ending(failure=FailureCode.WORKER_LOST))
    assert data.endswith(b"data: [DONE]\n\n")
    assert b'"code":"worker_lost"' in data


@pytest.mark.parametrize("after", [-1, 0, 30])
def test_a_call_comes_with_the_token_that_completes_it_at_every_reading(after: int) -> None:
    text = 'Yes.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'

    def events_behind(after: int) -> list[tuple[int, dict[str, Any]]]:
        reader = ToolCallReader(ToolRules(HERMES, frozenset({"f"})), "job-1")
        writer = JobWriter(ByteVocabulary(), SamplingParams(max_tokens=100), after, reader)
        data = writer.feed(0, TokensArrived(0, [TokenRecord(byte) for byte in text.encode()]))
        return events_of(data + writer.feed(0, StreamEnded(Ending(FinishReason.STOP), USAGE)))

    events = events_behind(after)
    assert events == events_behind(-1)[after + 1 :]
    (call,) = [call for _, event in events for call in event.get("tool_calls", ())]
    assert (call["index"], call["function"]) == (0, {"name": "f", "arguments": '{"a": 1}'})
    if after < 0:
        assert "".join(event["text"] for _, event in events) == "Yes."
    assert events[-1][1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("header", "query", "after"),
    [(None, None, -1), ("7", None, 7), (None, "0", 0), ("7", "3", 7), ("", "", -1)],
)
def test_the_header_wins_over_the_query(header: str | None, query: str | None, after: int) -> None:
    assert resume_point(header, query) == after


@pytest.mark.parametrize("given", ["x", "-1", "1.5", "9" * 10, "²"])
def test_what_is_no_event_id_is_refused(given: str) -> None:
    with pytest.raises(InvalidField) as caught:
        resume_point(given, None)
    assert caught.value.param == "Last-Event-ID"
