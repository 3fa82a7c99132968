"""Tool calls in an answer's text, as it comes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.intake.detokenizer import num_could_begin
from pipeline.intake.tool_dialects import DIALECTS, ToolDialect

_ID_CHARS = 24
_BETWEEN = re.compile(r"[\s,;]*")


@dataclass(frozen=True, slots=True)
class ToolRules:
    """How an answer's calls are read. `names` may be called; `is_named`: the client chose one."""

    dialect: ToolDialect
    names: frozenset[str]
    is_named: bool = False

    def kept(self) -> dict[str, Any]:
        """As JSON, for whoever reads the answer again."""
        names = sorted(self.names)
        return {"dialect": self.dialect.name, "names": names, "is_named": self.is_named}

    @classmethod
    def found(cls, kept: Mapping[str, Any]) -> ToolRules:
        """The inverse of `kept`."""
        return cls(DIALECTS[kept["dialect"]], frozenset(kept["names"]), kept["is_named"])

    def reason(self, reason: str, num_calls: int) -> str:
        """Of an answer that ended with `reason`, as OpenAI has it.

        A call that the client named ends with `stop` like any text.
        """
        return "tool_calls" if reason == "stop" and num_calls and not self.is_named else reason


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call `number` of its answer, from 0; `arguments` is a JSON object as text."""

    number: int
    call_id: str
    name: str
    arguments: str

    def as_object(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}

    def as_delta(self) -> dict[str, Any]:
        """The same in a stream."""
        return {"index": self.number, **self.as_object()}


class ToolCallReader:
    """Takes the text of one choice apart into plain text and whole calls.

    A call comes when it is complete. What looks like one and is none (broken JSON, a name that
    nobody offered) is plain text. White space beside calls is dropped. `choice_id` makes the ids of
    calls: whoever reads the same answer again finds the same.
    """

    def __init__(self, rules: ToolRules, choice_id: str) -> None:
        self._rules = rules
        self._dialect = rules.dialect
        self._choice_id = choice_id
        self._held = ""
        self._opening: str | None = None  # of the call that is being read
        self._has_begun = False
        self.num_calls = 0

    def feed(self, text: str) -> list[str | ToolCall]:
        """What the next text lets go, in order."""
        self._held += text
        parts: list[str | ToolCall] = []
        while self._opening is None or self._dialect.close:
            is_over = self._read_call(parts) if self._opening is not None else self._seek(parts)
            if is_over:
                break
        return parts

    def finish(self) -> list[str | ToolCall]:
        """What was still held, at the end."""
        held, self._held = self._held, ""
        if self._opening is not None:
            return self._calls(held, self._opening + held)
        return [held] if held.strip() or (held and not self.num_calls) else []

    def reason(self, reason: str) -> str:
        """See `ToolRules.reason`, at the end."""
        return self._rules.reason(reason, self.num_calls)

    def _seek(self, parts: list[str | ToolCall]) -> bool:
        """Let text go up to a call; True if more text is needed."""
        dialect = self._dialect
        stripped = self._held.lstrip()
        if dialect.is_bare and not self._has_begun and stripped[:1] in ("{", ""):
            self._held = stripped if stripped else self._held
            self._opening = "" if stripped else None
            return not stripped
        before, marker, behind = self._held.partition(dialect.marker)
        if marker:
            self._let_go(parts, before.rstrip())
            self._held, self._opening = behind, marker
            return False
        num_held = num_could_begin(self._held, dialect.marker)
        text = self._held[: len(self._held) - num_held].rstrip()
        self._held = self._held[len(text) :]
        self._let_go(parts, text)
        return True

    def _read_call(self, parts: list[str | ToolCall]) -> bool:
        """Take the call that has begun; True if its end has not come yet."""
        body, close, behind = self._held.partition(self._dialect.close)
        if not close:
            return True
        parts += self._calls(body, f"{self._opening}{body}{close}")
        self._held, self._opening = behind, None
        return False

    def _let_go(self, parts: list[str | ToolCall], text: str) -> None:
        if text:
            self._has_begun = True
            parts.append(text)

    def _calls(self, body: str, raw: str) -> list[str | ToolCall]:
        self._has_begun = True
        try:
            found = [self._as_call(value) for value in _json_values(body)]
        except (ValueError, RecursionError):
            found = []
        calls = [call for call in found if call is not None]
        if not calls or len(calls) < len(found):
            return [raw]
        return [self._numbered(name, arguments) for name, arguments in calls]

    def _as_call(self, value: object) -> tuple[str, str] | None:
        if not isinstance(value, dict) or value.get("name") not in self._rules.names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            return None
        return str(value["name"]), _json_text(arguments)

    def _numbered(self, name: str, arguments: str) -> ToolCall:
        number = self.num_calls
        self.num_calls += 1
        digest = hashlib.sha256(f"{self._choice_id}/{number}".encode()).hexdigest()
        num_chars = self._dialect.id_chars
        call_id = digest[:num_chars] if num_chars else f"call_{digest[:_ID_CHARS]}"
        return ToolCall(number, call_id, name, arguments)


def split_calls(text: str, rules: ToolRules | None, choice_id: str) -> tuple[str, list[ToolCall]]:
    """A whole answer as (plain text, calls)."""
    if rules is None:
        return text, []
    reader = ToolCallReader(rules, choice_id)
    parts = [*reader.feed(text), *reader.finish()]
    said = "".join(part for part in parts if isinstance(part, str))
    return said, [part for part in parts if isinstance(part, ToolCall)]


def said_with_calls(said: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """`content`, and `tool_calls` if there are any, as an assistant's message has them."""
    if not calls:
        return {"content": said}
    return {"content": said or None, "tool_calls": [call.as_object() for call in calls]}


def _json_text(value: dict[str, Any]) -> str:
    """Raises ValueError for numbers that JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    is_unicode = not any("\ud800" <= char <= "\udfff" for char in text)
    return text if is_unicode else json.dumps(value)


def _json_values(text: str) -> Iterator[object]:
    """JSON values side by side; those of a list one by one. Raises ValueError."""
    decoder = json.JSONDecoder()
    place = _end_of_gap(text, 0)
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        yield from value if isinstance(value, list) else [value]
        place = _end_of_gap(text, place)


def _end_of_gap(text: str, place: int) -> int:
    gap = _BETWEEN.match(text, place)
    return place if gap is None else gap.end()
