"""Types of body fields that take what OpenAI takes and coerce nothing."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from pipeline.protocol.request import Priority

MAX_PROMPTS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_BIASES = 1024
MAX_BIAS = 100
MAX_BAD_WORDS = 256
_ID_DIGITS = 10
_PRIORITIES = (Priority.HIGH, Priority.NORMAL, Priority.LOW, Priority.BATCH)


def _whole(value: object) -> object:
    """An integer; 5.0 is one, true and "5" are not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("whole", "must be an integer")
    if isinstance(value, float):
        if not math.isfinite(value) or not value.is_integer():
            raise PydanticCustomError("whole", "must be an integer")
        return int(value)
    return value


def _number(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("number", "must be a number")
    return value


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32


def _ids(value: object) -> object:
    if not isinstance(value, list) or not all(_is_id(item) for item in value):
        raise PydanticCustomError("ids", "must be a list of token ids")
    return value


def _stop(value: object) -> tuple[str, ...]:
    """One string or several; none empty."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise PydanticCustomError("stop", "must be a non-empty string or a list of them")
    if len(texts) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_CHARS for text in texts):
        raise PydanticCustomError("stop", "has too many or too long strings")
    return tuple(texts)


def _bad_words(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise PydanticCustomError("bad_words", "must be a list of non-empty strings")
    if len(value) > MAX_BAD_WORDS or any(len(text) > MAX_STOP_CHARS for text in value):
        raise PydanticCustomError("bad_words", "has too many or too long strings")
    return tuple(value)


def _biases(value: object) -> dict[int, float]:
    """JSON's keys are strings: token ids in decimal digits."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise PydanticCustomError("biases", "must be an object of not too many token ids")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        is_id = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS
        if not is_id:
            raise PydanticCustomError("biases", "must have token ids as its keys")
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_number or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise PydanticCustomError("biases", "must have numbers from -100 to 100 as its values")
        biases[int(key)] = float(bias)
    return biases


def _prompts(value: object) -> list[str | list[int]]:
    """A prompt in any of its four forms as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("prompt", "must be text, token ids, or a non-empty list of these")
    if all(_is_id(item) for item in value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise PydanticCustomError("prompt", "has too many prompts")
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) and item and all(map(_is_id, item)) for item in value):
        return value
    raise PydanticCustomError("prompt", "must be all text or all non-empty lists of token ids")


def _priority(value: object) -> Priority:
    if isinstance(value, str) and value.upper() in Priority.__members__:
        return Priority[value.upper()]
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(_PRIORITIES):
        return _PRIORITIES[value]
    raise PydanticCustomError("priority", "must be high, normal, low, batch or 0..3")


def _one_or_many(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "array", "items": schema}]}


# What the checks above take, for the OpenAPI document.
_ID_SCHEMA = {"type": "integer", "minimum": 0}
_PROMPT_SCHEMA = {
    "anyOf": [
        *_one_or_many({"type": "string"})["anyOf"],
        {"type": "array", "items": _ID_SCHEMA, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": _ID_SCHEMA, "minItems": 1}},
    ]
}
_BIAS_SCHEMA = {
    "type": "object",
    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
}
_PRIORITY_SCHEMA = {"enum": [*(step.name.lower() for step in _PRIORITIES), 0, 1, 2, 3]}

Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number)]
TokenIds = Annotated[list[int], BeforeValidator(_ids)]
StopStrings = Annotated[
    tuple[str, ...], BeforeValidator(_stop), WithJsonSchema(_one_or_many({"type": "string"}))
]
BadWords = Annotated[tuple[str, ...], BeforeValidator(_bad_words)]
Biases = Annotated[dict[int, float], BeforeValidator(_biases), WithJsonSchema(_BIAS_SCHEMA)]
Prompts = Annotated[
    list[str | list[int]], BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)
]
PriorityStep = Annotated[Priority, BeforeValidator(_priority), WithJsonSchema(_PRIORITY_SCHEMA)]


def refusal(param: str, message: str) -> PydanticCustomError:
    """An error below the place where it is raised: `param` is joined to that place."""
    return PydanticCustomError("refusal", "{text}", {"param": param, "text": message})


def unsupported(param: str) -> PydanticCustomError:
    """The same for something that this server cannot do."""
    return PydanticCustomError("unsupported", "is not supported", {"param": param})


def join_text_parts(parts: list[object]) -> str:
    """Text parts with line ends between them, as other servers join them; empty ones stay.

    Raises:
        PydanticCustomError: a part is not text.
    """
    texts: list[str] = []
    for rank, part in enumerate(parts):
        place = f"content[{rank}]"
        if not isinstance(part, dict):
            raise refusal(place, "must be an object")
        kind = part.get("type")
        if kind != "text":
            raise unsupported(f"{place}.type")
        text = part.get("text")
        if not isinstance(text, str):
            raise refusal(f"{place}.text", "must be a string")
        texts.append(text)
    return "\n".join(texts)
