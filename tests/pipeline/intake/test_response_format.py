"""`response_format` in a chat body: held, or refused at once."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.intake.build import AnswerKind, Caller, Generation, Intake
from pipeline.intake.chat_template import CHATML, ChatTemplate
from pipeline.intake.errors import RequestRefused
from pipeline.intake.vocabulary import ByteVocabulary


def chat(kind: AnswerKind = AnswerKind.CHAT, **fields: Any) -> Generation:
    intake = Intake(ByteVocabulary(), ChatTemplate(CHATML), "m")
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return intake.build(kind, body, Caller())


def by_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **fields}}


def refusal(**fields: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        chat(**fields)
    return caught.value


@pytest.mark.parametrize(
    "given",
    [
        {"type": "json_object"},
        by_schema({"type": "object"}),
        by_schema({"type": "object"}, strict=True, description="d"),
        {"type": "json_schema", "json_schema": {"name": "a"}},
    ],
)
def test_a_format_becomes_a_grammar_of_every_choice(given: dict[str, Any]) -> None:
    requests = chat(response_format=given, n=2).requests
    assert requests[0].sampling.grammar
    assert requests[0].sampling.grammar == requests[1].sampling.grammar
    assert chat(AnswerKind.JOB, response_format=given).requests[0].sampling.grammar


@pytest.mark.parametrize("given", [None, {"type": "text"}])
def test_text_has_no_grammar(given: Any) -> None:
    assert chat(response_format=given).requests[0].sampling.grammar == ""


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"type": "xml"}, "response_format.type"),
        ({}, "response_format.type"),
        ("json_object", "response_format"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_object", "json_schema": {"name": "a"}}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.name"),
        (
            {"type": "json_schema", "json_schema": {"name": "a b"}},
            "response_format.json_schema.name",
        ),
        (by_schema([]), "response_format.json_schema.schema"),
        (by_schema({"not": {}}), "response_format"),
        (by_schema({"type": "array", "uniqueItems": True}), "response_format"),
        (by_schema({"enum": ["x" * 70_000]}), "response_format"),
    ],
)
def test_what_cannot_be_held_is_refused(given: Any, param: str) -> None:
    refused = refusal(response_format=given)
    assert (refused.status, refused.code, refused.param) == (400, "invalid_value", param)


def test_an_end_that_must_be_ignored_contradicts_a_format() -> None:
    refused = refusal(response_format={"type": "json_object"}, ignore_eos=True)
    assert (refused.status, refused.param) == (400, "ignore_eos")
