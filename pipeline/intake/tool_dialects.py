"""How families of models write tool calls, and grammars that make them do so."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeline.intake.grammar import json_schema_rule
from pipeline.intake.tool_bodies import FunctionBody
from pipeline.intake.vocabulary import Vocabulary

MAX_CALLS = 16  # of one answer that must call
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolDialect:
    """One way to write calls: JSON objects with `name` and `arguments_key`.

    marker: begins a call, or all of them. close: ends one; empty: they go on to the end of the
    answer. is_bare: an answer that begins with an object is a call without marker too.
    is_list: all calls stand in one JSON list. between: what models write between two. id_chars:
    length of a call's id, where the template insists on one.
    """

    name: str
    marker: str
    arguments_key: str = "arguments"
    close: str = ""
    between: str = ", "
    is_bare: bool = False
    is_list: bool = False
    id_chars: int | None = None


HERMES = ToolDialect("hermes", "<tool_call>", close="</tool_call>", between="\n")
MISTRAL = ToolDialect("mistral", "[TOOL_CALLS]", is_list=True, id_chars=9)
LLAMA = ToolDialect(
    "llama", "<|python_tag|>", arguments_key="parameters", between="; ", is_bare=True
)
DIALECTS = {dialect.name: dialect for dialect in (HERMES, MISTRAL, LLAMA)}


def find_dialect(template: str) -> ToolDialect | None:
    """The dialect that a chat template teaches; None if it knows no tools, or none of ours."""
    if "tools" not in template:
        return None
    if HERMES.marker in template:
        return HERMES
    if MISTRAL.marker in template:
        return MISTRAL
    is_llama = LLAMA.marker in template or "ipython" in template
    return LLAMA if is_llama and LLAMA.arguments_key in template else None


class CallNeed(StrEnum):
    """Whether an answer may be text, must be calls, or both."""

    MAY = "may"
    MUST = "must"


def call_grammar(
    dialect: ToolDialect,
    functions: Sequence[FunctionBody],
    vocabulary: Vocabulary,
    need: CallNeed,
    max_calls: int,
) -> str:
    """The grammar of answers that call `functions` as the dialect writes it.

    Arguments obey their schema where a call must come, or the function is strict.
    """
    rules: list[str] = []
    for number, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function.name)}, "{dialect.arguments_key}": '
        is_held = need is CallNeed.MUST or function.strict
        schema = function.schema_of_arguments if is_held else _ANY_OBJECT
        rules += [
            f'call_{number}: {json.dumps(head)} args_{number} "}}"',
            f"args_{number}: {json_schema_rule(schema)}",
        ]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    token_id = dict(vocabulary.special_texts).get(dialect.marker)
    rules += _shape(dialect, token_id, max_calls)
    if need is CallNeed.MUST:
        return "\n".join([*rules, "start: all"])
    return "\n".join([*rules, *_free_start(dialect, token_id, max_calls)])


def _shape(dialect: ToolDialect, token_id: int | None, max_calls: int) -> list[str]:
    """Rules `body`, what follows a marker, and `all`, calls and nothing else."""
    marker = json.dumps(dialect.marker) if token_id is None else f"<[{token_id}]>"
    between = json.dumps(dialect.between)
    more_calls = _up_to(max_calls - 1, f"{between} call")
    if dialect.is_bare:
        return [f"all: call {more_calls}"]
    if dialect.is_list:
        return [f'body: "[" call {more_calls} "]"', f"all: {marker} body"]
    close = json.dumps(f"\n{dialect.close}")
    return [
        f'body: "\\n" call {close}',
        f"all: {marker} body {_up_to(max_calls - 1, f'{between} {marker} body')}",
    ]


def _up_to(count: int, rule: str) -> str:
    return f"({rule}){{0,{count}}}" if count else ""


def _free_start(dialect: ToolDialect, token_id: int | None, max_calls: int) -> list[str]:
    """Text, calls, or text and then calls."""
    if dialect.is_bare:
        return ["start: | all | TEXT", "TEXT: /[^{](?s:.*)/"]
    if token_id is not None:
        return ["start: TEXT? all?", "TEXT: /(?s:.+)/"]
    # The marker is text among text: what stands before a call ends with it, the rest is without it.
    calls = "before body" if dialect.is_list else f"(before body){{1,{max_calls}}} REST?"
    return [
        f"start: REST | {calls}",
        f"before[suffix={json.dumps(dialect.marker)}]: /(?s:.*)/",
        f"REST: /(?s:.*)/ & ~/(?s:.*){re.escape(dialect.marker)}(?s:.*)/",
    ]
