"""POST /v1/responses: the text subset, as the chat that it comes to.

Supported: model, input (text, or messages of text parts), instructions, max_output_tokens, sampling,
stream, background, store, previous_response_id, metadata, text.format. Passed over: what says
nothing to a model of text. All else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from pipeline.intake.errors import InvalidField, RequestRefused, UnsupportedField
from pipeline.intake.field_policy import IGNORED_BY_BOTH, FieldPolicy, check_metadata
from pipeline.intake.schemas import Strict, validate

MAX_CARD_BYTES = 1 << 20  # of a conversation that is kept to be continued
_PART_TYPES = ("input_text", "output_text", "text")
_ROLES = ("system", "developer", "user", "assistant")
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
    }
)
RESPONSE_FIELDS = FieldPolicy(
    supported=_AS_IN_CHAT | _OWN,
    ignored=(IGNORED_BY_BOTH - {"metadata", "service_tier"})
    | {"parallel_tool_calls", "reasoning", "stream_options", "max_tool_calls"},
    neutral={
        "tools": ([],),
        "tool_choice": ("none", "auto"),
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

    def encode(self) -> str:
        """For the ledger; bounded, and never the work of writing a long conversation down."""
        num_chars = sum(len(message["content"]) for message in self.messages or ())
        text = self.model_dump_json() if num_chars <= MAX_CARD_BYTES else ""
        if text and len(text) <= MAX_CARD_BYTES:
            return text
        return self.model_copy(update={"messages": None}).model_dump_json()


_TEXT = {"type": "string"}
_PART = {"type": "object", "properties": {"type": {"enum": list(_PART_TYPES)}, "text": _TEXT}}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": list(_ROLES)},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART}]},
    },
}
_INPUT = {"anyOf": [_TEXT, {"type": "array", "items": _MESSAGE, "minItems": 1}]}


class ResponseShape(BaseModel):
    """The body's own fields. `input` and `max_output_tokens` are checked with what they become."""

    model_config = Strict

    input: Annotated[Any, WithJsonSchema(_INPUT)] = None
    instructions: str | None = None
    max_output_tokens: Annotated[Any, WithJsonSchema({"type": "integer", "minimum": 1})] = None
    background: bool = False
    store: bool = True
    previous_response_id: str | None = None
    metadata: dict[str, str] = {}
    text: dict[str, Any] = {}


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
        first = [] if card.instructions is None else [_message("system", card.instructions)]
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
            messages=_messages(fields["input"]),
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
    return refused


def _messages(value: object) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [_message("user", value)]
    if not isinstance(value, list) or not value:
        raise InvalidField("input", "input must be text or a non-empty list of messages.")
    return [_item(f"input[{rank}]", item) for rank, item in enumerate(value)]


def _item(place: str, item: object) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise InvalidField(place, f"{place} must be an object.")
    if item.get("type", "message") != "message":
        raise UnsupportedField(f"{place}.type")
    if item.get("role") not in _ROLES:
        raise InvalidField(f"{place}.role", f"{place}.role must be one of {', '.join(_ROLES)}.")
    return _message(item["role"], _text(f"{place}.content", item.get("content")))


def _text(place: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidField(place, f"{place} must be text or a list of text parts.")
    texts = []
    for rank, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in _PART_TYPES:
            raise UnsupportedField(f"{place}[{rank}].type")
        if not isinstance(part.get("text"), str):
            raise InvalidField(f"{place}[{rank}].text", f"{place}[{rank}].text must be a string.")
        texts.append(part["text"])
    return "\n".join(texts)


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


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
