"""Cases C037, C038, C040, C042, C043, C053, C055, C023: what a body may hold."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.intake.errors import InvalidField, RequestRefused, UnsupportedField
from pipeline.intake.schemas import parse_chat, parse_completion

BASE: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("max_tokens", 5.5),
        ("stream", "yes"),
        ("stream", 1),
        ("n", 1.5),
        ("n", 0),
        ("n", -1),
        ("n", 1_000_000),
        ("seed", 2**63),
        ("seed", 1e20),
        ("seed", "7"),
        ("seed", 1.5),
        ("temperature", 2.01),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 1.01),
        ("top_p", float("inf")),
        ("top_k", -2),
        ("stop", ""),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("ignore_eos", "true"),
        ("min_p", 1.01),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 11),
        ("presence_penalty", 2.1),
        ("presence_penalty", False),
        ("frequency_penalty", -2.1),
        ("logit_bias", []),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"\u0661": 1}),
        ("logit_bias", {"1": 100.1}),
        ("logit_bias", {"1": float("nan")}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {str(number): 1 for number in range(1025)}),
        ("min_tokens", -1),
        ("min_tokens", 1.5),
        ("bad_words", "x"),
        ("bad_words", [""]),
        ("bad_words", [["x"]]),
        ("skip_special_tokens", 0),
        ("include_stop_str_in_output", "no"),
        ("top_logprobs", 21),
        ("logprobs", 1),
        ("priority", 4),
        ("priority", "urgent"),
        ("priority", True),
        ("messages", "x"),
        ("messages", []),
        ("user", 5),
        ("metadata", {"a": 1}),
        ("metadata", {str(number): "x" for number in range(17)}),
        ("service_tier", "priority"),
    ],
)
def test_a_value_that_a_field_may_not_have_is_refused_and_named(field: str, value: object) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_chat({**BASE, field: value})
    assert caught.value.status == 400
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 5.0),
        ("temperature", 0),
        ("temperature", 1e-9),
        ("top_p", 0),
        ("top_p", 1),
        ("top_k", -1),
        ("stop", "x"),
        ("stop", ["a", "b", "c", "d"]),
        ("stop", []),
        ("seed", -1),
        ("min_p", 0),
        ("min_p", 1),
        ("repetition_penalty", 0.1),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("logit_bias", {}),
        ("logit_bias", {"1": -100, "2": 100, "3": 0.5}),
        ("min_tokens", 0),
        ("bad_words", []),
        ("skip_special_tokens", False),
        ("include_stop_str_in_output", True),
        ("stream", True),
    ],
)
def test_a_value_at_the_edge_is_taken(field: str, value: object) -> None:
    parse_chat({**BASE, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x"}),
        ("modalities", ["audio"]),
        ("best_of", 2),
        ("echo", True),
        ("store", True),
        ("spaces_between_special_tokens", False),
        ("guided_json", {}),
        ("kv_transfer_params", {}),
        ("chat_template", "x"),
        ("no_such_field", 1),
    ],
)
def test_what_would_change_the_answer_is_refused(field: str, value: object) -> None:
    with pytest.raises(UnsupportedField) as caught:
        parse_chat({**BASE, field: value})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("best_of", 1),
        ("echo", False),
        ("store", False),
        ("chat_template_kwargs", {}),
        ("stream_options", None),
    ],
)
def test_a_neutral_value_of_an_unsupported_field_is_taken_in_silence(
    field: str, value: object
) -> None:
    _, ignored = parse_chat({**BASE, field: value})
    assert ignored == ()


def test_a_boolean_is_not_a_neutral_number() -> None:
    with pytest.raises(UnsupportedField):
        parse_chat({**BASE, "best_of": True})


def test_fields_without_effect_are_named() -> None:
    body = {**BASE, "user": "u", "metadata": {"a": "b"}, "reasoning_effort": "low"}
    assert parse_chat(body)[1] == ("user", "metadata", "reasoning_effort")


def test_min_tokens_is_kept_by_an_answer_that_ignores_its_end() -> None:
    parse_chat({**BASE, "min_tokens": 5, "max_tokens": 5, "ignore_eos": True})


def test_best_of_may_equal_n() -> None:
    parse_completion({"model": "m", "prompt": "x", "n": 2, "best_of": 2})
    with pytest.raises(UnsupportedField):
        parse_completion({"model": "m", "prompt": "x", "n": 2, "best_of": 3})


@pytest.mark.parametrize("n", [2, None])
def test_best_of_is_never_less_or_more_than_n(n: int | None) -> None:
    with pytest.raises(UnsupportedField):
        parse_completion({"model": "m", "prompt": "x", "n": n, "best_of": 1 if n else 2})


@pytest.mark.parametrize("stream", [{}, {"stream": False}])
def test_stream_options_need_a_stream(stream: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_chat({**BASE, **stream, "stream_options": {"include_usage": True}})
    assert caught.value.param == "stream_options"


def test_stream_options_are_checked_and_unknown_ones_refused() -> None:
    streaming = {**BASE, "stream": True}
    options = {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": True}
    assert parse_chat({**streaming, "stream_options": options})[0].includes_usage
    with pytest.raises(InvalidField, match="include_usage"):
        parse_chat({**streaming, "stream_options": {"include_usage": "true"}})
    with pytest.raises(UnsupportedField, match="more"):
        parse_chat({**streaming, "stream_options": {"more": True}})


def test_top_logprobs_need_logprobs() -> None:
    with pytest.raises(InvalidField) as caught:
        parse_chat({**BASE, "top_logprobs": 2})
    assert caught.value.param == "top_logprobs"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": "x", "audio": {}}, "messages[0].audio"),
        ("x", "messages[0]"),
    ],
)
def test_a_message_that_is_none_is_refused_at_its_place(message: object, param: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse_chat({"model": "m", "messages": [message]})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_messages_as_the_sdk_sends_them_back_are_taken() -> None:
    sent_back: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
    }
    parse_chat({"model": "m", "messages": [*BASE["messages"], sent_back]})


def test_errors_neither_repeat_nor_grow_with_the_input() -> None:
    junk = "\u00e9" * 100_000
    for body in ({**BASE, junk: 1}, {**BASE, "stop": [junk] * 99}, {**BASE, "priority": junk}):
        with pytest.raises(RequestRefused) as caught:
            parse_chat(body)
        assert len(str(caught.value.body()).encode()) < 1024
