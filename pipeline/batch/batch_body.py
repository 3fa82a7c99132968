"""The body of POST /v1/batches, checked without coercion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.batch.batch_store import BatchOrder
from pipeline.intake.errors import InvalidField, UnsupportedField, clip

MIN_LIFETIME_S = 3_600
MAX_LIFETIME_S = 30 * 86_400
_MAX_ID_CHARS = 64
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class OutputLifetime(BaseModel):
    """When the files that a batch writes are removed."""

    model_config = _STRICT

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_LIFETIME_S, le=MAX_LIFETIME_S)]


class BatchBody(BaseModel):
    """Fields that are null were absent."""

    model_config = _STRICT

    input_file_id: Annotated[str, Field(min_length=1, max_length=_MAX_ID_CHARS)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None
    output_expires_after: OutputLifetime | None = None


def parse_order(body: Mapping[str, Any]) -> BatchOrder:
    """What a client asks for.

    Raises:
        InvalidField, UnsupportedField: see the field named.
    """
    given = {name: value for name, value in body.items() if value is not None}
    try:
        parsed = BatchBody.model_validate(given)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in details["loc"])
        if details["type"] == "extra_forbidden":
            raise UnsupportedField(place) from None
        if details["type"] == "missing":
            raise InvalidField(place, f"{clip(place)} is required.") from None
        raise InvalidField(place, f"{clip(place)}: {details['msg']}.") from None
    lifetime = parsed.output_expires_after
    return BatchOrder(
        input_file_id=parsed.input_file_id,
        endpoint=parsed.endpoint,
        metadata=parsed.metadata,
        output_lifetime_s=None if lifetime is None else lifetime.seconds,
    )
