"""Cases C031, C032, C034, C035, C039, C040, C042, C043, C054, C062: bodies become requests."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.intake.build import AnswerKind, Caller, Generation, Intake
from pipeline.intake.chat_template import CHATML, ChatTemplate
from pipeline.intake.errors import ContextExceeded, RequestRefused
from pipeline.intake.vocabulary import ByteVocabulary
from pipeline.protocol.request import Priority
from pipeline.script_book import BOS_ID, EOS_ID, IM_END_ID

CONTEXT = 512
USER_X = [{"role": "user", "content": "x"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
OPTIONAL_CHAT_FIELDS = (
    *("stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "min_tokens"),
    *("tools", "tool_choice", "functions", "function_call", "response_format", "logit_bias"),
    *("temperature", "top_p", "top_k", "presence_penalty", "stop", "stop_token_ids"),
    *("ignore_eos", "logprobs", "top_logprobs", "user", "priority", "metadata", "modalities"),
    *("audio", "service_tier", "store", "cache"),
)


def intake(vocabulary: ByteVocabulary | None = None) -> Intake:
    return Intake(vocabulary or ByteVocabulary(), ChatTemplate(CHATML), "m")


def chat(**body: Any) -> Generation:
    return intake().build(AnswerKind.CHAT, {"model": "m", "messages": USER_X, **body}, Caller())


def complete(**body: Any) -> Generation:
    return intake().build(AnswerKind.COMPLETION, {"model": "m", "prompt": "x", **body}, Caller())


def prompt_of(generation: Generation) -> list[int]:
    return list(generation.requests[0].prompt_tokens)


def refusal_of_chat(**body: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        chat(**body)
    return caught.value


def test_null_is_absent_for_every_optional_field() -> None:
    generation = chat(**dict.fromkeys(OPTIONAL_CHAT_FIELDS), seed=1)
    plain = chat(seed=1)
    assert generation.requests[0].sampling == plain.requests[0].sampling
    assert generation.requests[0].prompt_tokens == plain.requests[0].prompt_tokens
    assert generation.ignored == ()


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_a_chat_for_no_tokens_is_refused(max_tokens: int) -> None:
    assert refusal_of_chat(max_tokens=max_tokens).param == "max_tokens"


def test_too_many_tokens_are_refused_with_both_numbers() -> None:
    error = refusal_of_chat(max_tokens=999_999_999)
    assert isinstance(error, ContextExceeded)
    assert (error.code, error.param) == ("context_length_exceeded", "messages")
    assert "512" in error.message
    assert "999999999" in error.message


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ContextExceeded) as caught:
        complete(prompt="x" * (CONTEXT + 1))
    assert caught.value.param == "prompt"
    with pytest.raises(ContextExceeded):
        complete(prompt="x" * CONTEXT)


def test_a_prompt_that_leaves_one_token_gets_one() -> None:
    assert complete(prompt="x" * (CONTEXT - 1)).requests[0].sampling.max_tokens == 1


def test_completions_default_to_16_tokens_and_chat_to_the_rest_of_the_context() -> None:
    assert complete().requests[0].sampling.max_tokens == 16
    generation = chat()
    assert generation.requests[0].sampling.max_tokens == CONTEXT - len(prompt_of(generation))


def test_either_name_of_the_token_limit_works() -> None:
    assert chat(max_tokens=5).requests[0].sampling.max_tokens == 5
    assert chat(max_completion_tokens=5).requests[0].sampling.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).requests[0].sampling.max_tokens == 5
    message = refusal_of_chat(max_tokens=5, max_completion_tokens=6).message
    assert "max_tokens" in message
    assert "max_completion_tokens" in message


@pytest.mark.parametrize("prompt", ["", [""], None])
def test_an_empty_prompt_starts_from_the_beginning_token(prompt: object) -> None:
    assert prompt_of(complete(prompt=prompt)) == [BOS_ID]


@pytest.mark.parametrize(
    "prompt", [[], [[]], [1, 2, 260], [-1], [5279552648203111001], [True], ["a", 1], 5, [[1], "a"]]
)
def test_a_prompt_that_is_none_is_refused(prompt: object) -> None:
    with pytest.raises(RequestRefused) as caught:
        complete(prompt=prompt)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_a_model_without_a_beginning_token_refuses_an_empty_prompt() -> None:
    vocabulary = ByteVocabulary()
    vocabulary.bos_token_id = None
    with pytest.raises(RequestRefused, match="empty"):
        intake(vocabulary).build(AnswerKind.COMPLETION, {"model": "m", "prompt": ""}, Caller())


def test_empty_user_content_is_a_prompt() -> None:
    assert IM_END_ID in prompt_of(chat(messages=[{"role": "user", "content": ""}]))
    assert refusal_of_chat(messages=[]).param == "messages"


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool", "developer"])
def test_text_parts_are_joined_by_line_ends(role: str) -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "text", "text": ""},
        {"type": "text", "text": "b"},
    ]
    joined = chat(messages=[{"role": role, "content": "a\n\nb"}])
    assert prompt_of(chat(messages=[{"role": role, "content": parts}])) == prompt_of(joined)


def test_control_tokens_in_a_raw_prompt_are_control_tokens() -> None:
    assert prompt_of(complete(prompt="a<|im_end|>")) == [ord("a"), IM_END_ID]


def test_choices_are_prompts_times_n_with_a_seed_each() -> None:
    generation = complete(prompt=["a", "b"], n=3, seed=2**63 - 1)
    assert [bytes(request.prompt_tokens) for request in generation.requests] == [
        b"a",
        b"a",
        b"a",
        b"b",
        b"b",
        b"b",
    ]
    seeds = [request.sampling.seed for request in generation.requests]
    assert seeds[:3] == seeds[3:] == [2**63 - 1, -(2**63), -(2**63) + 1]
    ids = {request.request_id for request in generation.requests}
    assert len(ids) == 6
    assert all(request_id.startswith(generation.answer_id) for request_id in ids)


def test_a_seed_is_drawn_when_none_is_given() -> None:
    assert chat().requests[0].sampling.seed != chat().requests[0].sampling.seed


@pytest.mark.parametrize("seed", [-1, 0, 2**63 - 1])
def test_a_seed_of_64_bits_is_kept(seed: int) -> None:
    assert chat(seed=seed).requests[0].sampling.seed == seed


def test_log_probabilities_mean_the_same_in_both_routes() -> None:
    assert chat().requests[0].sampling.num_logprobs is None
    assert chat(logprobs=True).requests[0].sampling.num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).requests[0].sampling.num_logprobs == 3
    assert complete(logprobs=2).requests[0].sampling.num_logprobs == 2


def test_a_control_token_as_stop_string_stops_at_its_id() -> None:
    assert chat(stop=["<eos>", "x"]).requests[0].sampling.stop_token_ids == (EOS_ID,)


@pytest.mark.parametrize(
    ("asked", "priority"),
    [
        ({}, Priority.NORMAL),
        ({"priority": "high"}, Priority.HIGH),
        ({"priority": 2}, Priority.LOW),
        ({"service_tier": "flex"}, Priority.LOW),
    ],
)
def test_priorities_have_names_and_numbers(asked: dict[str, Any], priority: Priority) -> None:
    assert chat(**asked).requests[0].priority is priority


def test_the_callers_terms_win_over_the_body() -> None:
    caller = Caller("t", "salt", Priority.BATCH, queue_deadline_s=9.0, total_deadline_s=10.0)
    body = {"model": "m", "messages": USER_X, "priority": "high"}
    (request,) = intake().build(AnswerKind.CHAT, body, caller, "chatcmpl-1").requests
    assert (request.tenant, request.tenant_salt, request.priority) == ("t", "salt", Priority.BATCH)
    assert (request.queue_deadline_s, request.total_deadline_s) == (9.0, 10.0)
    assert request.request_id == "chatcmpl-1"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": USER_X},
        {"prompt": "x"},
        {"messages": USER_X, "prompt": None},
        {"messages": None, "prompt": "x"},
    ],
)
def test_a_job_takes_messages_or_a_prompt(body: dict[str, Any]) -> None:
    generation = intake().build(AnswerKind.JOB, {"model": "m", **body}, Caller())
    assert generation.answer_id == generation.requests[0].request_id
    assert generation.answer_id.startswith("job-")


@pytest.mark.parametrize(("body", "param"), [({"n": 2}, "n"), ({"prompt": ["a", "b"]}, "prompt")])
def test_a_job_has_one_answer(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        intake().build(AnswerKind.JOB, {"model": "m", "prompt": "x", **body}, Caller())
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body", [{"prompt": "x", "logprobs": 0}, {"messages": USER_X, "logprobs": True}]
)
def test_a_job_has_no_logprobs_and_says_so(body: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused) as caught:
        intake().build(AnswerKind.JOB, {"model": "m", **body}, Caller())
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "logprobs")


def test_tool_calls_need_a_template_that_shows_them() -> None:
    messages = [*USER_X, {"role": "assistant", "tool_calls": [CALL]}]
    error = refusal_of_chat(messages=messages)
    assert (error.code, error.param) == ("unsupported_parameter", "messages[1].tool_calls")


def test_options_of_sampling_reach_the_request() -> None:
    sampling = (
        chat(
            min_p=0.1,
            repetition_penalty=1.2,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            logit_bias={"65": -100, "66": 1},
            min_tokens=3,
            skip_special_tokens=False,
            include_stop_str_in_output=True,
        )
        .requests[0]
        .sampling
    )
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-0.5, 0.25)
    assert sampling.logit_bias == ((65, -100.0), (66, 1.0))
    assert sampling.min_tokens == 3
    assert sampling.changes_logits
    assert not sampling.skip_special_tokens
    assert sampling.include_stop_str_in_output
    assert not chat().requests[0].sampling.changes_logits


def test_bad_words_are_spelled_at_a_start_and_behind_a_space() -> None:
    assert chat(bad_words=["ab", " c"]).requests[0].sampling.bad_words == (
        (97, 98),
        (32, 97, 98),
        (32, 99),
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"260": 1}}, "logit_bias"),
        ({"stop_token_ids": [260]}, "stop_token_ids"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_an_option_that_fits_neither_model_nor_request_is_refused(
    fields: dict[str, Any], param: str
) -> None:
    error = refusal_of_chat(**fields)
    assert (error.status, error.param) == (400, param)


def test_no_token_at_all_is_for_an_echo_only() -> None:
    generation = complete(prompt="x" * CONTEXT, echo=True, max_tokens=0, logprobs=1)
    sampling = generation.requests[0].sampling
    assert (sampling.max_tokens, sampling.scores_prompt) == (0, True)
    assert not complete(echo=True).requests[0].sampling.scores_prompt
    with pytest.raises(RequestRefused) as caught:
        complete(max_tokens=0)
    assert caught.value.param == "max_tokens"
    with pytest.raises(ContextExceeded):
        complete(prompt="x" * (CONTEXT + 1), echo=True, max_tokens=0)


def test_a_job_and_a_chat_have_no_echo() -> None:
    assert refusal_of_chat(echo=True).param == "echo"
    with pytest.raises(RequestRefused) as caught:
        intake().build(AnswerKind.JOB, {"model": "m", "prompt": "x", "echo": True}, Caller())
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "echo")


def test_an_echo_is_the_text_that_was_sent_or_what_its_tokens_spell() -> None:
    generation = complete(prompt=["a<eos>", "b"], n=2, echo=True)
    assert [generation.echo_of(index).text for index in range(4)] == ["a<eos>", "a<eos>", "b", "b"]  # type: ignore[union-attr]
    ids = complete(prompt=[97, EOS_ID, 0xC3, 0xA9, 0xC3], echo=True).echo_of(0)
    assert ids is not None
    assert ids.text == "a<eos>\u00e9\ufffd"
    empty = complete(prompt="", echo=True).echo_of(0)
    assert empty is not None
    assert (empty.text, empty.offsets(ByteVocabulary())) == ("", (0,))
    assert complete().echo_of(0) is None
