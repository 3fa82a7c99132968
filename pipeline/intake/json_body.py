"""Bytes of a request body to one JSON object, strictly."""

from __future__ import annotations

import json
from typing import Any

import orjson

from pipeline.intake.errors import BrokenBody, InvalidField


def parse_json_object(data: bytes) -> dict[str, Any]:
    """One JSON object in UTF-8.

    NaN, Infinity, numbers beyond a double, lone surrogates, a byte order mark and more than 1024
    levels of nesting are refused. Nothing of the input is repeated in the messages.

    Raises:
        BrokenBody: it is not that.
        InvalidField: a string has half a surrogate pair; names the place.
    """
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if "surrogate" in str(error):
            _name_surrogate(data)
        raise BrokenBody(f"The body is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise BrokenBody("The body must be a JSON object.")
    return value


def _name_surrogate(data: bytes) -> None:
    """Say where the lone surrogate stands, with the lenient parser of the standard library.

    Raises:
        InvalidField: always, when the rest of the body is fine.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    place = _find_surrogate(value)
    if place is not None:
        raise InvalidField(place, f"{place} holds half a surrogate pair.")


def _find_surrogate(root: object) -> str | None:
    waiting: list[tuple[str, object]] = [("", root)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, str) and not _is_unicode(value):
            return place
        if isinstance(value, dict):
            waiting += [(f"{place}.{key}".lstrip("."), item) for key, item in value.items()]
            if not all(_is_unicode(key) for key in value):
                return place or "body"
        elif isinstance(value, list):
            waiting += [(f"{place}[{rank}]", item) for rank, item in enumerate(value)]
    return None


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)
