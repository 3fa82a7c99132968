"""Request bodies as OpenAI types them, checked without coercion."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from pipeline.intake.errors import InvalidField, UnsupportedField, clip
from pipeline.intake.field_policy import CHAT_FIELDS, COMPLETION_FIELDS
from pipeline.intake.field_types import (
    BadWords,
    Biases,
    Number,
    PriorityStep,
    Prompts,
    StopStrings,
    TokenIds,
    Whole,
    join_text_parts,
    refusal,
)
from pipeline.intake.response_format import ResponseFormat
from pipeline.intake.tool_bodies import CalledTool, FunctionBody, NamedTool, ToolChoice, Tools
from pipeline.protocol.request import Priority
from pipeline.protocol.sampling import MAX_TOP_LOGPROBS

MAX_CHOICES = 8
MAX_SEQUENCES = 128  # prompts times choices of one body
MAX_COMPLETION_LOGPROBS = 5
MAX_SALT_CHARS = 256
_INT64 = 2**63
_MESSAGE_FIELDS_WITHOUT_EFFECT = ("annotations", "reasoning_content", "refusal")


Strict = ConfigDict(frozen=True, extra="forbid", strict=True)


class StreamOptions(BaseModel):
    """`include_obfuscation` is accepted and changes nothing.

    `continuous_usage_stats` goes with `include_usage`, as in vLLM: alone it changes nothing.
    """

    model_config = Strict

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(BaseModel):
    """What both routes share. Fields that are None were absent."""

    model_config = Strict

    model: Annotated[str, Field(min_length=1)]
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2, allow_inf_nan=False)] = 1.0
    top_p: Annotated[Number, Field(ge=0, le=1, allow_inf_nan=False)] = 1.0
    top_k: Annotated[Whole, Field(ge=-1, lt=2**31)] = 0
    seed: Annotated[Whole, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: StopStrings = ()
    stop_token_ids: TokenIds = []
    ignore_eos: bool = False
    min_p: Annotated[Number, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    repetition_penalty: Annotated[Number, Field(gt=0, le=10, allow_inf_nan=False)] = 1.0
    presence_penalty: Annotated[Number, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2, allow_inf_nan=False)] = 0.0
    logit_bias: Biases = {}
    min_tokens: Annotated[Whole, Field(ge=0)] = 0
    bad_words: BadWords = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] = 1
    priority: PriorityStep = Priority.NORMAL
    cache: bool = True
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    @model_validator(mode="after")
    def _options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "needs stream to be true")
        return self

    @property
    def includes_usage(self) -> bool:
        """True when a stream shall end with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_usage(self) -> bool:
        """True when every chunk of a stream shall tell the usage so far."""
        options = self.stream_options
        return self.includes_usage and options is not None and bool(options.continuous_usage_stats)


class CompletionBody(GenerationBody):
    """POST /v1/completions. `prompt` [] with one empty text stands for null."""

    prompt: Prompts
    max_tokens: Annotated[Whole, Field(ge=0)] | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _has_something_to_say(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise refusal("max_tokens", "must be at least 1, or 0 with echo")
        if len(self.prompt) * self.n > MAX_SEQUENCES:
            raise refusal("n", f"times the number of prompts is above {MAX_SEQUENCES}")
        return self


class MessageBody(BaseModel):
    """One message; `content` is text or None after validation, `developer` is `system`."""

    model_config = Strict

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, value: object) -> object:
        if not isinstance(value, dict):
            raise PydanticCustomError("message", "must be an object")
        if value.get("role") == "developer":
            value = {**value, "role": "system"}
        if isinstance(value.get("content"), list):
            value = {**value, "content": join_text_parts(value["content"])}
        return {
            key: item
            for key, item in value.items()
            if item is not None and key not in _MESSAGE_FIELDS_WITHOUT_EFFECT
        }

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise refusal("content", "is missing")
        return self


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[MessageBody], Field(min_length=1)]
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool = False
    response_format: ResponseFormat | None = None
    tools: Tools = []
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal("top_logprobs", "needs logprobs to be true")
        self._check_tools()
        if self.continue_final_message:
            self._check_last_message()
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise refusal("max_tokens", "differs from max_completion_tokens")
        return self

    @property
    def offered(self) -> tuple[FunctionBody, ...]:
        """The functions that the answer may call: the named one, all, or none."""
        if self.tool_choice == "none":
            return ()
        functions = tuple(tool.function for tool in self.tools)
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return tuple(function for function in functions if function.name == name)
        return functions

    @property
    def form_grammar(self) -> str:
        """What `response_format` asks for; empty: nothing. Raises `GrammarRefused`."""
        return "" if self.response_format is None else self.response_format.grammar

    def _check_tools(self) -> None:
        """Raises `PydanticCustomError`."""
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise refusal("tools", "has two functions of one name")
        if self.tool_choice not in (None, "none") and not self.offered:
            raise refusal("tool_choice", "needs tools, and the one that it names among them")
        has_form = self.response_format is not None and self.response_format.type != "text"
        if has_form and self.offered:
            raise refusal("response_format", "cannot go with tools that may be called")

    def _check_last_message(self) -> None:
        """Raises `PydanticCustomError` unless an answer can go on with it."""
        if self.add_generation_prompt:
            raise refusal("continue_final_message", "cannot go with add_generation_prompt")
        last = self.messages[-1]
        if last.role != "assistant" or last.content is None or last.tool_calls:
            raise refusal("continue_final_message", "needs text of the assistant as last message")


def parse_completion(body: Mapping[str, Any]) -> tuple[CompletionBody, tuple[str, ...]]:
    """A completions body and the names of fields that were passed over.

    Raises:
        InvalidField, UnsupportedField: see the field named.
    """
    fields, ignored = COMPLETION_FIELDS.screen(body)
    if "prompt" not in fields and "prompt" in body:
        fields["prompt"] = ""
    return validate(CompletionBody, fields), ignored


def parse_chat(body: Mapping[str, Any]) -> tuple[ChatBody, tuple[str, ...]]:
    """A chat body and the names of fields that were passed over.

    Raises:
        InvalidField, UnsupportedField: see the field named.
    """
    fields, ignored = CHAT_FIELDS.screen(body)
    return validate(ChatBody, fields), ignored


_Body = TypeVar("_Body", bound=BaseModel)


def validate(kind: type[_Body], fields: Mapping[str, Any], within: str = "") -> _Body:
    """Fields that are set as a body of this kind, checked without coercion.

    `within` names the field that they are the fields of, if they are not the body itself.

    Raises:
        InvalidField, UnsupportedField: the first thing that is wrong.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
    raise _refused(details, within)


def _refused(details: ErrorDetails, within: str) -> InvalidField | UnsupportedField:
    """The first thing that is wrong, with its place and without the client's input."""
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in details["loc"])
    param = details.get("ctx", {}).get("param")
    place = ".".join(part for part in (within, place.lstrip("."), param) if part)
    if details["type"] in ("unsupported", "extra_forbidden"):
        return UnsupportedField(place)
    return InvalidField(place, f"{clip(place)} {_as_clause(details['msg'])}.")


def _as_clause(message: str) -> str:
    words = message.replace("Field required", "is required")
    return re.sub(r"^(Input|String|List) should", "should", words)
