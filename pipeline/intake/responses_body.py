"""POST /v1/responses: text and functions, as the chat that it comes to.

Supported: model, input (text, or messages of text parts, calls of functions and what these gave),
instructions, max_output_tokens, sampling, tools that are functions, stream, background, store,
previous_response_id, metadata, text.format. Passed over: what says nothing to a model of text. All
else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from pipeline.intake.errors import InvalidField, RequestRefused
from pipeline.intake.field_policy import IGNORED_BY_BOTH, FieldPolicy, check_metadata
from pipeline.intake.responses_items import (
    INPUT_SCHEMA,
    chat_tool_choice,
    chat_tools,
    message,
    messages_of,
)
from pipeline.intake.schemas import Strict, validate
from pipeline.intake.tool_calls import ToolRules

MAX_CARD_BYTES = 1 << 20  # of a conversation that is kept to be continued
# Fields of a chat that mean the same here.
_AS_IN_CHAT = frozenset(
    {
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "min_tokens",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "priority",
        "service_tier",
        "stream",
        "chat_template_kwargs",
    }
)
_OWN = frozenset(
    {
        "input",
        "instructions",
        "max_output_tokens",
        "background",
        "store",
        "previous_response_id",
        "metadata",
        "text",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
    }
)
RESPONSE_FIELDS = FieldPolicy(
    supported=_AS_IN_CHAT | _OWN,
    ignored=(IGNORED_BY_BOTH - {"metadata", "service_tier"})
    | {"reasoning", "stream_options", "max_tool_calls"},
    neutral={
        "include": ([],),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
    },
)


class ResponseCard(BaseModel):
    """What is kept of a response beyond its tokens, and shown again with it.

    `messages` are the whole conversation before the answer, without `instructions`; None: too long
    to be kept. It ends with the retention of its request.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    model: str = ""
    is_background: bool = False
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    previous_response_id: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    text: dict[str, Any] = {"format": {"type": "text"}}
    service_tier: str | None = None
    messages: list[dict[str, Any]] | None = []
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    tool_rules: dict[str, Any] | None = None

    @property
    def rules(self) -> ToolRules | None:
        """How calls are read out of the answer; None: there are none."""
        return None if self.tool_rules is None else ToolRules.found(self.tool_rules)

    def reading(self, rules: ToolRules | None) -> ResponseCard:
        """The same, where calls are read out of the answer so."""
        return self if rules is None else self.model_copy(update={"tool_rules": rules.kept()})

    def encode(self) -> str:
        """For the ledger, without a conversation, then without tools too, that would be too long.

        What is left is bounded by the body's size. A long conversation is not even written down.
        """
        num_chars = sum(_num_chars(message) for message in self.messages or ())
        text = self.model_dump_json() if num_chars <= MAX_CARD_BYTES else ""
        cuts: list[dict[str, object]] = [{"messages": None}, {"messages": None, "tools": []}]
        for too_much in cuts:
            if text and len(text) <= MAX_CARD_BYTES:
                break
            text = self.model_copy(update=too_much).model_dump_json()
        return text


def _num_chars(message: Mapping[str, Any]) -> int:
    """Of its text and of its calls' arguments."""
    calls = message.get("tool_calls") or ()
    return len(message.get("content") or "") + sum(
        len(call["function"]["arguments"]) for call in calls
    )


_NAME = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"}
_TOOLS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "name": _NAME,
            "description": {"type": "string"},
            "parameters": {"type": "object"},
            "strict": {"type": "boolean"},
        },
        "required": ["type", "name"],
    },
}
_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {"type": "object", "properties": {"type": {"const": "function"}, "name": _NAME}},
    ]
}


class ResponseShape(BaseModel):
    """The body's own fields. `input` and `max_output_tokens` are checked with what they become."""

    model_config = Strict

    input: Annotated[Any, WithJsonSchema(INPUT_SCHEMA)] = None
    instructions: str | None = None
    max_output_tokens: Annotated[Any, WithJsonSchema({"type": "integer", "minimum": 1})] = None
    background: bool = False
    store: bool = True
    previous_response_id: str | None = None
    metadata: dict[str, str] = {}
    text: dict[str, Any] = {}
    tools: Annotated[Any, WithJsonSchema(_TOOLS)] = []
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE)] = "auto"
    parallel_tool_calls: bool = True


@dataclass(frozen=True, slots=True)
class ResponseOrder:
    """A checked body. `chat` lacks its messages: `card.messages` go behind the history."""

    chat: Mapping[str, Any]
    card: ResponseCard
    is_stored: bool
    streams: bool
    ignored: tuple[str, ...]

    def chat_body(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The chat that the model is asked."""
        card = self.card
        first = [] if card.instructions is None else [message("system", card.instructions)]
        return {**self.chat, "messages": [*first, *history, *(card.messages or [])]}


def parse_response(body: Mapping[str, Any]) -> ResponseOrder:
    """Check a body's own fields; those of a chat are checked when the chat is built.

    Raises:
        InvalidField, UnsupportedField: see the field named.
    """
    fields, ignored = RESPONSE_FIELDS.screen(body)
    own = validate(ResponseShape, {k: v for k, v in fields.items() if k in _OWN})
    if "input" not in fields:
        raise InvalidField("input", "input is required.")
    if own.background and not own.store:
        raise InvalidField("background", "background needs store to be true.")
    check_metadata(own.metadata)
    chat = {name: value for name, value in fields.items() if name in _AS_IN_CHAT}
    if own.max_output_tokens is not None:
        chat["max_completion_tokens"] = own.max_output_tokens
    if own.tools != []:
        chat["tools"] = chat_tools(own.tools)
        chat["parallel_tool_calls"] = own.parallel_tool_calls
    if own.tools != [] or own.tool_choice not in ("none", "auto"):
        chat["tool_choice"] = chat_tool_choice(own.tool_choice)
    text = {"format": {"type": "text"}} | own.text
    if text["format"] != {"type": "text"}:
        chat["response_format"] = _response_format(text["format"])
    return ResponseOrder(
        chat=chat,
        card=ResponseCard(
            model=_text_or_empty(fields.get("model")),
            is_background=own.background,
            instructions=own.instructions,
            max_output_tokens=_whole_or_none(own.max_output_tokens),
            metadata=own.metadata,
            previous_response_id=own.previous_response_id,
            temperature=_number_or(fields.get("temperature"), 1.0),
            top_p=_number_or(fields.get("top_p"), 1.0),
            text=text,
            service_tier="default" if fields.get("service_tier") else None,
            messages=messages_of(fields["input"]),
            **_shown_tools(own),
        ),
        is_stored=own.store,
        streams=fields.get("stream") is True,
        ignored=ignored,
    )


_NAMES_HERE = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}


def renamed(refused: RequestRefused) -> RequestRefused:
    """A refusal of the chat, in the names of this route."""
    for there, here in _NAMES_HERE.items():
        if refused.param is not None and refused.param.startswith(there):
            refused.param = here
            refused.message = refused.message.replace(there, here)
    if refused.param is not None and refused.param.startswith("tool"):
        refused.param = refused.param.replace(".function", "")
        refused.message = refused.message.replace(".function", "")
    return refused


def _shown_tools(own: ResponseShape) -> dict[str, Any]:
    """What the card shows; values of another type are refused with the chat."""
    is_list = isinstance(own.tools, list) and all(isinstance(tool, dict) for tool in own.tools)
    is_choice = isinstance(own.tool_choice, str | dict)
    return {
        "tools": own.tools if is_list else [],
        "tool_choice": own.tool_choice if is_choice else "auto",
        "parallel_tool_calls": own.parallel_tool_calls,
    }


def _response_format(value: object) -> object:
    """Of a chat: the schema lies one level deeper there."""
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return value
    return {"type": "json_schema", "json_schema": {k: v for k, v in value.items() if k != "type"}}


def _number_or(value: object, default: float) -> float:
    """What the card shows; a value that is no number is refused with the chat."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else default  # type: ignore[arg-type]


def _whole_or_none(value: object) -> int | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and value == int(value) else None  # type: ignore[call-overload]


def _text_or_empty(value: object) -> str:
    return value if isinstance(value, str) else ""
