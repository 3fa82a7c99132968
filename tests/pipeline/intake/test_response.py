"""Whole answers, usage and log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from pipeline.intake.answer_text import AnswerText
from pipeline.intake.build import AnswerKind, Caller, Generation, Intake
from pipeline.intake.chat_template import CHATML, ChatTemplate
from pipeline.intake.errors import RequestCancelled, RequestFailed
from pipeline.intake.response import AnswerShape, ChoiceCollector
from pipeline.intake.vocabulary import ByteVocabulary
from pipeline.protocol.failure import Ending, FailureCode, FinishReason
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.stream import PromptScored, RequestUsage, StreamEnded, TokensArrived
from pipeline.protocol.tokens import TokenRecord
from pipeline.script_book import BASE_VOCAB_SIZE

PIECES = (b"caf", b"\xc3", b"\xa9", b"!")
STOP = Ending(FinishReason.STOP)
USER_X = [{"role": "user", "content": "x"}]


def built(kind: AnswerKind, **body: Any) -> tuple[Generation, ByteVocabulary]:
    vocabulary = ByteVocabulary(PIECES)
    intake = Intake(vocabulary, ChatTemplate(CHATML), "m")
    asked = {"messages": USER_X} if kind is AnswerKind.CHAT else {"prompt": "x"}
    return intake.build(kind, {"model": "m", **asked, **body}, Caller()), vocabulary


def answered(kind: AnswerKind, ending: Ending = STOP, **body: Any) -> dict[str, Any]:
    """The answer when every choice speaks PIECES."""
    generation, vocabulary = built(kind, **body)
    outcomes = []
    for index, request in enumerate(generation.requests):
        num_logprobs = request.sampling.num_logprobs or 0
        records = [
            TokenRecord(
                BASE_VOCAB_SIZE + rank if len(piece) > 1 else piece[0],
                -0.25,
                tuple((ord("a") + best, -1.0 - best) for best in range(num_logprobs)),
            )
            for rank, piece in enumerate(PIECES)
        ]
        collector = ChoiceCollector(request.sampling, vocabulary)
        collector.feed(TokensArrived(0, records))
        collector.feed(StreamEnded(ending, RequestUsage(10, 4, 8 if index else 0)))
        outcomes.append(collector.outcome)
    return AnswerShape(generation, vocabulary).whole(outcomes)


def test_a_chat_answer_is_what_the_sdk_expects() -> None:
    answer = answered(AnswerKind.CHAT)
    typed = ChatCompletion.model_validate(answer, strict=True)
    assert typed.choices[0].message.content == "café!"
    assert typed.choices[0].message.role == "assistant"
    assert typed.choices[0].finish_reason == "stop"
    assert typed.id.startswith("chatcmpl-")
    assert answer["choices"][0]["logprobs"] is None


def test_a_completion_is_what_the_sdk_expects() -> None:
    typed = Completion.model_validate(
        answered(AnswerKind.COMPLETION, Ending(FinishReason.LENGTH)), strict=True
    )
    assert typed.choices[0].text == "café!"
    assert typed.choices[0].finish_reason == "length"
    assert typed.id.startswith("cmpl-")


def test_usage_counts_a_prompt_once_and_every_choice() -> None:
    usage = answered(AnswerKind.COMPLETION, prompt=["a", "b"], n=3)["usage"]
    assert usage["prompt_tokens"] == 20
    assert usage["completion_tokens"] == 24
    assert usage["total_tokens"] == 44
    assert usage["prompt_tokens_details"]["cached_tokens"] == 8


def test_chat_logprobs_have_bytes_and_spell_cut_characters_in_bytes() -> None:
    answer = answered(AnswerKind.CHAT, logprobs=True, top_logprobs=2)
    ChatCompletion.model_validate(answer, strict=True)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "café!"
    assert [entry["token"] for entry in entries] == ["caf", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert [top["token"] for top in entries[0]["top_logprobs"]] == ["a", "b"]


def test_completion_logprobs_are_parallel_lists_with_offsets() -> None:
    answer = answered(AnswerKind.COMPLETION, logprobs=2)
    Completion.model_validate(answer, strict=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 3, 3, 4]
    assert logprobs["token_logprobs"] == [-0.25] * 4
    assert logprobs["top_logprobs"][0] == {"a": -1.0, "b": -2.0, "caf": -0.25}
    assert len(logprobs["tokens"]) == 4


def test_minus_infinity_becomes_a_number_that_json_has() -> None:
    generation, vocabulary = built(AnswerKind.CHAT, logprobs=True)
    collector = ChoiceCollector(generation.requests[0].sampling, vocabulary)
    collector.feed(TokensArrived(0, [TokenRecord(97, float("-inf"))]))
    collector.feed(StreamEnded(Ending(FinishReason.STOP), RequestUsage(1, 1, 0)))
    answer = AnswerShape(generation, vocabulary).whole([collector.outcome])
    assert answer["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


@pytest.mark.parametrize(
    ("failure", "status", "headers"),
    [
        (FailureCode.NO_WORKERS, 503, (5, None)),
        (FailureCode.QUEUE_TIMEOUT, 504, (5, None)),
        (FailureCode.WORKER_LOST, 500, (None, False)),
        (FailureCode.DEADLINE_EXCEEDED, 504, (None, False)),
        (FailureCode.CONTEXT_EXCEEDED, 400, (None, None)),
        (FailureCode.INTERNAL_ERROR, 500, (None, None)),
    ],
)
def test_a_failed_choice_fails_the_answer(
    failure: FailureCode, status: int, headers: tuple[int | None, bool | None]
) -> None:
    with pytest.raises(RequestFailed) as caught:
        answered(AnswerKind.CHAT, Ending(failure=failure))
    error = caught.value
    assert (error.status, error.code) == (status, failure.value)
    assert (error.retry_after_s, error.should_retry) == headers


def test_a_cancelled_choice_is_an_error_and_no_finish_reason() -> None:
    with pytest.raises(RequestCancelled):
        answered(AnswerKind.CHAT, Ending(FinishReason.CANCELLED))


def test_tokens_that_lie_wholly_in_a_stop_string_are_not_shown() -> None:
    vocabulary = ByteVocabulary([b"ab", b"cd", b"ef"])
    sampling = SamplingParams(max_tokens=9, stop=("def",), num_logprobs=0)
    text = AnswerText(vocabulary, sampling)
    pieces = [text.feed(TokenRecord(BASE_VOCAB_SIZE + rank, -1.0)) for rank in range(3)]
    pieces.append(text.finish())
    shown = [piece for piece in pieces if piece is not None]
    assert "".join(piece.text for piece in shown) == "abc"
    assert [len(piece.tokens) for piece in shown] == [1, 1]
    assert [offset for piece in shown for offset in piece.offsets] == [0, 2]


def test_the_tier_is_named_when_it_was_asked_for() -> None:
    assert "service_tier" not in answered(AnswerKind.CHAT)
    assert answered(AnswerKind.CHAT, service_tier="auto")["service_tier"] == "default"
    assert answered(AnswerKind.CHAT, service_tier="flex")["service_tier"] == "flex"


def echoed(scores: list[TokenRecord] | None, **body: Any) -> dict[str, Any]:
    generation, vocabulary = built(AnswerKind.COMPLETION, echo=True, **body)
    collector = ChoiceCollector(generation.requests[0].sampling, vocabulary, generation.echo_of(0))
    if scores is not None:
        collector.feed(PromptScored(scores))
    collector.feed(TokensArrived(0, [TokenRecord(ord("!"), -0.25, ((ord("?"), -0.5),))]))
    collector.feed(StreamEnded(STOP, RequestUsage(3, 1, 0)))
    answer: dict[str, Any] = AnswerShape(generation, vocabulary).whole([collector.outcome])
    return answer["choices"][0]  # type: ignore[no-any-return]


def test_an_echo_stands_before_the_answer() -> None:
    choice = echoed(None, prompt="abc")
    assert (choice["text"], choice["logprobs"]) == ("abc!", None)


def test_scores_of_the_prompt_stand_before_those_of_the_answer() -> None:
    scores = [TokenRecord(0xA9, -1.0, ((97, -0.5),)), TokenRecord(99, -2.0, ((99, -2.0),))]
    choice = echoed(scores, prompt=[0xC3, 0xA9, 99], logprobs=1)
    assert choice["text"] == "\u00e9c!"
    assert choice["logprobs"] == {
        "tokens": ["bytes:\\xc3", "bytes:\\xa9", "c", "!"],
        "token_logprobs": [None, -1.0, -2.0, -0.25],
        "top_logprobs": [
            None,
            {"a": -0.5, "bytes:\\xa9": -1.0},
            {"c": -2.0},
            {"?": -0.5, "!": -0.25},
        ],
        "text_offset": [0, 0, 1, 2],
    }


def test_a_control_token_that_is_shown_has_its_log_probability() -> None:
    vocabulary = ByteVocabulary()
    sampling = SamplingParams(max_tokens=9, num_logprobs=0, skip_special_tokens=False)
    piece = AnswerText(vocabulary, sampling).feed(TokenRecord(256, -1.0))
    assert piece is not None
    assert (piece.text, len(piece.tokens)) == ("<bos>", 1)
