"""Grammars: what is refused, what may follow, where they end."""

# ruff: noqa: S311 - random texts, no secrets

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema
import pytest

from pipeline.intake.grammar import (
    MAX_COMPILED,
    GrammarBook,
    GrammarBroken,
    GrammarRefused,
    TokenGrammar,
    json_schema_grammar,
)
from pipeline.intake.vocabulary import ByteVocabulary
from pipeline.script_book import EOS_ID, IM_END_ID

PAIR = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["x", "xy"]},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def book() -> GrammarBook:
    return GrammarBook(ByteVocabulary((b'{"', b"")))


def allowed(grammar: TokenGrammar) -> list[int]:
    bits = int.from_bytes(grammar.allowed, "little")
    return [place for place in range(bits.bit_length()) if bits >> place & 1]


def walk(book: GrammarBook, schema: dict[str, Any], seed: int) -> str:
    """A text of tokens chosen at random among those allowed."""
    rng = random.Random(seed)
    vocabulary = ByteVocabulary((b'{"', b""))
    grammar = book.start(json_schema_grammar(schema))
    data = b""
    while not grammar.is_complete:
        choices = [token_id for token_id in allowed(grammar) if token_id != EOS_ID]
        token_id = rng.choice(choices)
        data += vocabulary.token_bytes(token_id)
        grammar.take(token_id)
        assert len(data) < 10_000
    return data.decode()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_chosen_among_the_allowed_obeys_the_schema(
    book: GrammarBook, seed: int
) -> None:
    jsonschema.validate(json.loads(walk(book, PAIR, seed)), PAIR)


def test_the_end_alone_may_follow_a_complete_text(book: GrammarBook) -> None:
    grammar = book.start(json_schema_grammar({"enum": ["x", "y"]}), list(b'"x'))
    assert not grammar.is_complete
    grammar.take(ord('"'))
    assert grammar.is_complete
    assert allowed(grammar) == [EOS_ID]


def test_the_end_may_follow_a_text_that_could_go_on(book: GrammarBook) -> None:
    grammar = book.start(json_schema_grammar({"type": "integer"}), list(b"12"))
    assert EOS_ID in allowed(grammar)
    assert not grammar.is_complete


def test_control_tokens_and_empty_tokens_are_never_allowed(book: GrammarBook) -> None:
    grammar = book.start(json_schema_grammar({"type": "string"}), list(b'"a'))
    empty = 261
    assert {IM_END_ID, EOS_ID, empty}.isdisjoint(allowed(grammar))
    assert ord("b") in allowed(grammar)


def test_the_place_in_a_grammar_follows_from_the_tokens_alone(book: GrammarBook) -> None:
    text = b'{"name": "ab", "kind": "xy", "sizes": [1, 2]}'
    stepped = book.start(json_schema_grammar(PAIR))
    for place, token_id in enumerate(text):
        resumed = book.start(json_schema_grammar(PAIR), list(text[:place]))
        assert resumed.allowed == stepped.allowed
        stepped.take(token_id)
    assert stepped.is_complete


def test_sequences_of_one_grammar_do_not_disturb_each_other(book: GrammarBook) -> None:
    one, other = (book.start(json_schema_grammar(PAIR)) for _ in range(2))
    for token_id in b'{"name": "':
        one.take(token_id)
    assert allowed(other) == allowed(book.start(json_schema_grammar(PAIR)))


def test_a_token_that_was_not_allowed_breaks_the_grammar(book: GrammarBook) -> None:
    grammar = book.start(json_schema_grammar(PAIR))
    with pytest.raises(GrammarBroken):
        grammar.take(ord("A"))
    with pytest.raises(GrammarBroken):
        book.start(json_schema_grammar(PAIR), list(b"A"))


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "string"}},
        {"type": "array", "uniqueItems": True},
        {"type": "object", "propertyNames": {"pattern": "a"}},
        {"if": {"type": "string"}, "then": {"minLength": 3}},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "string", "format": "no-such-format"},
        {"type": "string", "pattern": "^(?=a)b"},
        {"type": "strin"},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"$ref": "http://127.0.0.1:1/schema.json"},
        {"$ref": "file:///etc/passwd"},
        {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}},
    ],
)
def test_what_cannot_be_held_is_refused(book: GrammarBook, schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarRefused) as caught:
        book.check(json_schema_grammar(schema))
    assert len(caught.value.reason) < 250
    assert "\n" not in caught.value.reason


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [f"value {number}" for number in range(6_000)]},
        nested(90),
        nested(400),
    ],
)
def test_a_schema_without_measure_is_refused(book: GrammarBook, schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarRefused):
        book.check(json_schema_grammar(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "((a{0,100}){0,100}){0,100}"},
        {"type": "string", "pattern": "(.*a.{30}){10}"},
        {"type": "string", "maxLength": 10**9},
        {"enum": [f"v{number}" for number in range(5_000)]},
        {"properties": {f"p{number}": {"pattern": "^[a-z]{1,50}$"} for number in range(1_000)}},
    ],
)
def test_the_worst_schemas_are_answered_within_seconds(
    book: GrammarBook, schema: dict[str, Any]
) -> None:
    started_s = time.perf_counter()
    try:
        grammar = book.start(json_schema_grammar({"type": "string"} | schema))
        grammar.take(ord('"'))
    except (GrammarRefused, GrammarBroken):
        pass
    assert time.perf_counter() - started_s < 5


def test_compiled_grammars_are_bounded() -> None:
    book = GrammarBook(ByteVocabulary())
    for number in range(MAX_COMPILED + 10):
        book.check(json_schema_grammar({"const": number}))
    assert len(book._compiled) == MAX_COMPILED
    book.check(json_schema_grammar({"const": 0}))
