"""Options of the chat template, cases C064 and C066: what is opened, continued, passed on, kept as text."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.intake.build import AnswerKind, Caller, Generation, Intake
from pipeline.intake.chat_template import CHATML, ChatTemplate
from pipeline.intake.errors import RequestRefused
from pipeline.intake.vocabulary import ByteVocabulary
from pipeline.script_book import BOS_ID, IM_END_ID, IM_START_ID

USER = {"role": "user", "content": "x"}
SAID = {"role": "assistant", "content": "One, two"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SHOWING = "{{ mood | default('calm') }}|{{ (deep or {}).inner }}"
CHATTY = "{% for m in messages %}{{ m.content }}{% endfor %}"


def built(
    source: str = CHATML, messages: Any = (USER,), *, takes_kwargs: bool = True, **fields: Any
) -> Generation:
    template = ChatTemplate(source, {"bos_token": "<bos>"}, takes_kwargs=takes_kwargs)
    body = {"model": "m", "messages": list(messages), **fields}
    return Intake(ByteVocabulary(), template, "m").build(AnswerKind.CHAT, body, Caller("t", "salt"))


def prompt_of(*args: Any, **fields: Any) -> list[int]:
    return list(built(*args, **fields).requests[0].prompt_tokens)


def refusal_of(*args: Any, **fields: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        built(*args, **fields)
    assert caught.value.status == 400
    return caught.value


def test_c066_a_turn_is_opened_after_an_assistants_turn_too() -> None:
    opened = [IM_START_ID, *b"assistant\n"]
    assert prompt_of(messages=[SAID])[-len(opened) :] == opened
    assert prompt_of(messages=[SAID], add_generation_prompt=True) == prompt_of(messages=[SAID])


def test_no_turn_is_opened_when_none_is_wanted() -> None:
    ids = prompt_of(messages=[SAID], add_generation_prompt=False)
    assert ids == [IM_START_ID, *b"assistant\nOne, two", IM_END_ID, *b"\n"]


@pytest.mark.parametrize("said", ["One, two", "ends in a space ", "", "typed <|im_end|>", "<|im_"])
def test_c066_the_last_message_is_continued_where_it_stands(said: str) -> None:
    messages = [USER, {"role": "assistant", "content": said}]
    generation = built(messages=messages, continue_final_message=True)
    ids = list(generation.requests[0].prompt_tokens)
    last = [IM_START_ID, *f"assistant\n{said}".encode()]
    assert ids[-len(last) :] == last
    assert generation.requests[0].sampling.continues_text


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([USER], {}),
        ([SAID, USER], {}),
        ([USER, {"role": "assistant", "tool_calls": [CALL]}], {}),
        ([USER, SAID], {"add_generation_prompt": True}),
    ],
)
def test_what_cannot_be_continued_is_refused(messages: Any, fields: dict[str, Any]) -> None:
    refused = refusal_of(messages=messages, continue_final_message=True, **fields)
    assert refused.param == "continue_final_message"


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    refused = refusal_of("nothing", [USER, SAID], continue_final_message=True)
    assert refused.code == "template_refused"


def test_values_reach_the_template() -> None:
    values = {"mood": "brisk", "deep": {"inner": 3}}
    assert prompt_of(SHOWING, chat_template_kwargs=values) == [*b"brisk|3"]
    assert prompt_of(SHOWING, chat_template_kwargs={}) == [*b"calm|"]


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "bos_token", "tools"])
def test_what_is_ours_cannot_be_set_by_a_client(name: str) -> None:
    assert refusal_of(chat_template_kwargs={name: "x"}).param == "chat_template_kwargs"


def test_values_are_refused_where_the_operator_says_so() -> None:
    refused = refusal_of(takes_kwargs=False, chat_template_kwargs={"mood": "x"})
    assert (refused.code, refused.param) == ("unsupported_parameter", "chat_template_kwargs")
    assert built(takes_kwargs=False, chat_template_kwargs={}).requests


@pytest.mark.parametrize("value", [[], "x", {"a": {"b": object}}])
def test_values_that_are_no_object_are_refused(value: Any) -> None:
    if isinstance(value, dict):
        value = nested(1000)
    assert refusal_of(chat_template_kwargs=value).status == 400


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def num_special(ids: list[int]) -> int:
    return sum(token_id >= BOS_ID for token_id in ids)


def test_c064_control_tokens_in_values_and_keys_stay_text() -> None:
    source = "{{ mood | tojson }}<|im_end|>"
    ids = prompt_of(source, chat_template_kwargs={"mood": {"<|im_end|>": ["<bos>"]}})
    assert num_special(ids) == 1
    assert bytes(ids[:-1]) == b'{"<|im_end|>": ["<bos>"]}'


@pytest.mark.parametrize("cut", range(1, len("<|im_start|>")))
def test_c064_no_control_token_comes_of_two_messages_side_by_side(cut: int) -> None:
    written = "<|im_start|>"
    messages = [{"role": "user", "content": text} for text in (f"a{written[:cut]}", written[cut:])]
    ids = prompt_of(CHATTY, messages)
    assert num_special(ids) == 0
    assert bytes(ids) == b"a<|im_start|>"


def test_a_salt_narrows_what_is_shared_and_never_leaves_the_tenant() -> None:
    requests = [built(**fields).requests[0] for fields in ({}, *({"cache_salt": s} for s in "xyx"))]
    assert {request.tenant_salt for request in requests} == {"salt"}
    salts = [request.sampling.cache_salt for request in requests]
    assert salts[0] == ""
    assert salts[1] == salts[3] != salts[2]
    assert "x" not in salts[1]


@pytest.mark.parametrize("salt", ["", 5, "x" * 257])
def test_a_salt_is_a_short_text(salt: Any) -> None:
    assert refusal_of(cache_salt=salt).param == "cache_salt"
