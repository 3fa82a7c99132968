"""`response_format`: text, any JSON object, or JSON by a schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.intake.field_types import refusal
from pipeline.intake.grammar import json_schema_grammar

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class JsonSchema(BaseModel):
    """A schema with a name. It is held to the letter, whatever `strict` says."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: _Name
    description: str | None = None
    body: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What form the answer's text has."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise refusal("json_schema", "is missing")
        if self.type != "json_schema" and self.json_schema is not None:
            raise refusal("json_schema", "needs the type json_schema")
        return self

    @property
    def grammar(self) -> str:
        """What the answer's tokens obey; empty for text. Raises `GrammarRefused`."""
        if self.type == "text":
            return ""
        schema = self.json_schema.body if self.json_schema is not None else None
        return json_schema_grammar(_ANY_OBJECT if schema is None else schema)
