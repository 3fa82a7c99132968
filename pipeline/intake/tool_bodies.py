"""`tools`, `tool_choice` and the tool calls of a conversation, as OpenAI types them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

MAX_TOOLS = 128
_Strict = ConfigDict(frozen=True, extra="forbid", strict=True)
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionBody(BaseModel):
    """A function. Without `parameters` it takes none; `strict` holds its arguments to them."""

    model_config = _Strict

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _describe_an_object(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value and value.get("type", "object") != "object":
            raise PydanticCustomError("parameters", "must describe an object")
        return value

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """A JSON schema of an object."""
        if not self.parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object"} | self.parameters


class ToolBody(BaseModel):
    """One tool that the model may call."""

    model_config = _Strict

    type: Literal["function"]
    function: FunctionBody

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class _Named(BaseModel):
    model_config = _Strict

    name: ToolName


class NamedTool(BaseModel):
    """The one tool that must be called."""

    model_config = _Strict

    type: Literal["function"]
    function: _Named


def _tools(value: object) -> object:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise PydanticCustomError("tools", "must be a list of at most 128 tools")
    return value


Tools = Annotated[list[ToolBody], BeforeValidator(_tools)]


_MODES = ("none", "auto", "required")


def _choice(value: object) -> object:
    if not isinstance(value, dict):
        if value not in _MODES:
            raise PydanticCustomError("choice", "must be none, auto, required or a function")
        return value
    try:
        return NamedTool.model_validate(value)
    except ValidationError:
        raise PydanticCustomError("choice", "must name a function") from None


ToolMode = Literal["none", "auto", "required"]
ToolChoice = Annotated[ToolMode | NamedTool, BeforeValidator(_choice)]


class _CalledFunction(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    name: ToolName
    arguments: dict[str, Any]

    @field_validator("arguments", mode="before")
    @classmethod
    def _parse(cls, value: object) -> object:
        """Templates write JSON themselves: they want the object and not its text."""
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value or "{}")
        except (ValueError, RecursionError):
            raise PydanticCustomError("arguments", "must be a JSON object") from None


class CalledTool(BaseModel):
    """A call in the history of a conversation."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: _CalledFunction
