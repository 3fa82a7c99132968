"""Tool calls in the text of answers: found whole, in whatever pieces the text comes."""

from __future__ import annotations

import json

import pytest

from pipeline.intake.tool_calls import ToolCall, ToolCallReader, ToolRules
from pipeline.intake.tool_dialects import HERMES, LLAMA, MISTRAL, ToolDialect

NAMES = frozenset({"add", "look_up"})
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}'
LOOK = '{"name": "look_up", "arguments": {"word": "Grüße </tool"}}'
ONE = f"<tool_call>\n{ADD}\n</tool_call>"
TWO = f"{ONE}\n<tool_call>\n{LOOK}\n</tool_call>"


def read(
    dialect: ToolDialect, text: str, num_chars: int = 10_000
) -> tuple[str, list[tuple[str, object]]]:
    """What the text says, and the names and arguments of its calls."""
    reader = ToolCallReader(ToolRules(dialect, NAMES), "r1")
    parts: list[str | ToolCall] = []
    for start in range(0, len(text), num_chars):
        parts += reader.feed(text[start : start + num_chars])
    parts += reader.finish()
    said = "".join(part for part in parts if isinstance(part, str))
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert [call.number for call in calls] == list(range(len(calls)))
    assert len({call.call_id for call in calls}) == len(calls)
    return said, [(call.name, json.loads(call.arguments)) for call in calls]


ADDED = ("add", {"a": 1, "b": [2, {"c": "}"}]})
LOOKED = ("look_up", {"word": "Grüße </tool"})
BARE_ADD = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize("num_chars", [1, 2, 3, 7, 10_000])
@pytest.mark.parametrize(
    ("dialect", "text", "said", "calls"),
    [
        (HERMES, "Hello <b>you</b> <tool", "Hello <b>you</b> <tool", []),
        (HERMES, " padded\n\n", " padded\n\n", []),
        (HERMES, ONE, "", [ADDED]),
        (HERMES, TWO, "", [ADDED, LOOKED]),
        (HERMES, f"Let me see.\n\n{TWO}\n", "Let me see.", [ADDED, LOOKED]),
        (HERMES, f"{ONE} and more", " and more", [ADDED]),
        (HERMES, f"<tool_call>{ADD}", "", [ADDED]),
        (HERMES, f"<tool_call>\n[{ADD}, {LOOK}]</tool_call>", "", [ADDED, LOOKED]),
        (MISTRAL, f"[TOOL_CALLS] [{ADD}]", "", [ADDED]),
        (MISTRAL, f"Well.[TOOL_CALLS][{ADD}, {LOOK}]", "Well.", [ADDED, LOOKED]),
        (LLAMA, BARE_ADD, "", [("add", {"a": 1})]),
        (LLAMA, f"\n <|python_tag|>{BARE_ADD}; {BARE_ADD}", "", [("add", {"a": 1})] * 2),
        (LLAMA, f"I say {BARE_ADD}", f"I say {BARE_ADD}", []),
    ],
)
def test_calls_and_text_come_apart(
    dialect: ToolDialect, text: str, said: str, calls: list[object], num_chars: int
) -> None:
    assert read(dialect, text, num_chars) == (said, calls)


@pytest.mark.parametrize(
    "body",
    [
        "{broken",
        '{"name": "unknown", "arguments": {}}',
        '{"name": "add", "arguments": [1]}',
        '{"name": "add", "arguments": "no json"}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": 1e999}}',
        f"{ADD} trailing",
        "[" * 5_000,
        "",
    ],
)
def test_what_is_no_call_stays_text(body: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    assert read(HERMES, text, 1) == (text, [])


def test_arguments_that_came_as_text_are_unpacked() -> None:
    call = json.dumps({"name": "add", "arguments": '{"a": 1}'})
    assert read(HERMES, f"<tool_call>{call}</tool_call>") == ("", [("add", {"a": 1})])


def test_half_a_surrogate_pair_cannot_break_the_answer() -> None:
    reader = ToolCallReader(ToolRules(HERMES, NAMES), "r1")
    text = '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>'
    (call,) = reader.feed(text)
    assert isinstance(call, ToolCall)
    assert call.arguments.encode()


def test_a_call_comes_as_soon_as_it_is_complete() -> None:
    reader = ToolCallReader(ToolRules(HERMES, NAMES), "r1")
    assert reader.feed("Now: ") == ["Now:"]
    assert reader.feed(ONE[:-1]) == []
    (call,) = reader.feed(ONE[-1])
    assert isinstance(call, ToolCall)


def test_ids_are_the_same_for_whoever_reads_again_and_as_long_as_the_template_wants() -> None:
    ids = []
    for dialect, choice in ((HERMES, "r1"), (HERMES, "r1"), (HERMES, "r2"), (MISTRAL, "r1")):
        reader = ToolCallReader(ToolRules(dialect, NAMES), choice)
        (call,) = [*reader.feed(f"{dialect.marker}{ADD}"), *reader.finish()]
        assert isinstance(call, ToolCall)
        ids.append(call.call_id)
    assert ids[0] == ids[1] != ids[2]
    assert ids[0].startswith("call_")
    assert len(ids[3]) == 9
