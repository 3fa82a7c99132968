"""Items and tools of /v1/responses as the messages and tools of the chat that it comes to."""

from __future__ import annotations

from typing import Any

from pipeline.intake.errors import InvalidField, UnsupportedField

_PART_TYPES = ("input_text", "output_text", "text")
_ROLES = ("system", "developer", "user", "assistant")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_TEXT = {"type": "string"}
_PART = {"type": "object", "properties": {"type": {"enum": list(_PART_TYPES)}, "text": _TEXT}}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": _PART}]}
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": list(_ROLES)}, "content": _CONTENT},
}
_CALL = {
    "type": "object",
    "properties": {
        "type": {"const": "function_call"},
        "call_id": _TEXT,
        "name": _TEXT,
        "arguments": _TEXT,
    },
}
_OUTPUT = {
    "type": "object",
    "properties": {
        "type": {"const": "function_call_output"},
        "call_id": _TEXT,
        "output": _CONTENT,
    },
}
INPUT_SCHEMA = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": {"anyOf": [_MESSAGE, _CALL, _OUTPUT]}, "minItems": 1},
    ]
}


def message(role: str, content: str) -> dict[str, Any]:
    """A message of a chat."""
    return {"role": role, "content": content}


def messages_of(value: object) -> list[dict[str, Any]]:
    """What `input` adds to the conversation.

    Calls that stand side by side, or behind what the assistant said, are one message with it: so
    they were made.

    Raises:
        InvalidField, UnsupportedField: an item that is none, or none of ours.
    """
    if isinstance(value, str):
        return [message("user", value)]
    if not isinstance(value, list) or not value:
        raise InvalidField("input", "input must be text or a non-empty list of items.")
    found: list[dict[str, Any]] = []
    for rank, item in enumerate(value):
        _add_item(found, f"input[{rank}]", item)
    return found


def chat_tools(value: object) -> object:
    """The tools of a chat: there a function lies one level deeper. The rest is checked with the chat.

    Raises:
        UnsupportedField: a tool that is no function.
    """
    if not isinstance(value, list):
        return value
    for rank, tool in enumerate(value):
        if isinstance(tool, dict) and tool.get("type") != "function":
            raise UnsupportedField(f"tools[{rank}].type")
    return [_deeper(tool) for tool in value]


def chat_tool_choice(value: object) -> object:
    """The choice of a chat. Raises `UnsupportedField`: it names no function."""
    if isinstance(value, dict):
        if value.get("type") != "function":
            raise UnsupportedField("tool_choice.type")
        return _deeper(value)
    return value


def _deeper(tool: object) -> object:
    if not isinstance(tool, dict):
        return tool
    function = {name: tool[name] for name in _FUNCTION_FIELDS if tool.get(name) is not None}
    rest = {k: v for k, v in tool.items() if k not in _FUNCTION_FIELDS}
    return {**rest, "function": function}


def _add_item(found: list[dict[str, Any]], place: str, item: object) -> None:
    if not isinstance(item, dict):
        raise InvalidField(place, f"{place} must be an object.")
    match item.get("type", "message"):
        case "message":
            found.append(_said(place, item))
        case "function_call":
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append(_call(place, item))
        case "function_call_output":
            content = _text(f"{place}.output", item.get("output"))
            call_id = _string(place, item, "call_id")
            found.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case _:
            raise UnsupportedField(f"{place}.type")


def _said(place: str, item: dict[str, Any]) -> dict[str, Any]:
    if item.get("role") not in _ROLES:
        raise InvalidField(f"{place}.role", f"{place}.role must be one of {', '.join(_ROLES)}.")
    return message(item["role"], _text(f"{place}.content", item.get("content")))


def _call(place: str, item: dict[str, Any]) -> dict[str, Any]:
    function = {name: _string(place, item, name) for name in ("name", "arguments")}
    return {"id": _string(place, item, "call_id"), "type": "function", "function": function}


def _string(place: str, item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidField(f"{place}.{name}", f"{place}.{name} must be a string.")
    return value


def _text(place: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidField(place, f"{place} must be text or a list of text parts.")
    texts = []
    for rank, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in _PART_TYPES:
            raise UnsupportedField(f"{place}[{rank}].type")
        texts.append(_string(f"{place}[{rank}]", part, "text"))
    return "\n".join(texts)
