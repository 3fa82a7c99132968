"""The output of a response, item by item: messages of text and calls of functions.

Whole answers and streams are made by the same steps, so that both say the same.
"""

from __future__ import annotations

from typing import Any

from pipeline.intake.tool_calls import ToolCall, ToolCallReader, ToolRules

# One event of a stream: its type, and its fields.
Step = tuple[str, dict[str, Any]]


class OutputItems:
    """Takes an answer's text in pieces. `items` are those that are complete.

    A message opens with its first text and closes before a call. Without `rules` there are no calls,
    and the one message may be opened ahead of its text.
    """

    def __init__(self, response_id: str, rules: ToolRules | None) -> None:
        self._hex_id = response_id.partition("_")[2]
        self._reader = None if rules is None else ToolCallReader(rules, response_id)
        self._pieces: list[str] | None = None  # of the message that is open
        self.items: list[dict[str, Any]] = []

    @property
    def has_calls(self) -> bool:
        """True if there may be calls."""
        return self._reader is not None

    def open(self) -> list[Step]:
        """Open a message, unless one is open."""
        if self._pieces is not None:
            return []
        self._pieces = []
        item = self._message("in_progress")
        added = ("response.output_item.added", {"output_index": len(self.items), "item": item})
        return [added, ("response.content_part.added", self._place() | {"part": _part("")})]

    def feed(self, text: str) -> list[Step]:
        """The steps of the next piece of text."""
        if self._reader is None:
            return self._say(text)
        return self._take(self._reader.feed(text))

    def finish(self, status: str, *, needs_item: bool) -> list[Step]:
        """The last steps; with `needs_item` an answer that says nothing has an empty message."""
        steps = [] if self._reader is None else self._take(self._reader.finish())
        if needs_item and not self.items:
            steps += self.open()
        return steps + self._close("completed" if status == "completed" else "incomplete")

    def _take(self, parts: list[str | ToolCall]) -> list[Step]:
        steps = []
        for part in parts:
            steps += self._say(part) if isinstance(part, str) else self._call(part)
        return steps

    def _say(self, text: str) -> list[Step]:
        if not text:
            return []
        steps = self.open()
        if self._pieces is not None:
            self._pieces.append(text)
        delta = {"delta": text, "logprobs": []}
        return [*steps, ("response.output_text.delta", self._place() | delta)]

    def _close(self, status: str) -> list[Step]:
        if self._pieces is None:
            return []
        text, place = "".join(self._pieces), self._place()
        item = self._message(status, [_part(text)])
        done = {"output_index": len(self.items), "item": item}
        self.items.append(item)
        self._pieces = None
        return [
            ("response.output_text.done", place | {"text": text, "logprobs": []}),
            ("response.content_part.done", place | {"part": _part(text)}),
            ("response.output_item.done", done),
        ]

    def _call(self, call: ToolCall) -> list[Step]:
        """A call comes whole, so its arguments are one delta."""
        steps = self._close("completed")
        index = len(self.items)
        item = {
            "id": f"fc_{self._hex_id}_{call.number}",
            "type": "function_call",
            "status": "completed",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
        }
        begun = item | {"status": "in_progress", "arguments": ""}
        self.items.append(item)
        place = {"item_id": item["id"], "output_index": index}
        whole = {"name": call.name, "arguments": call.arguments}
        return [
            *steps,
            ("response.output_item.added", {"output_index": index, "item": begun}),
            ("response.function_call_arguments.delta", place | {"delta": call.arguments}),
            ("response.function_call_arguments.done", place | whole),
            ("response.output_item.done", {"output_index": index, "item": item}),
        ]

    def _place(self) -> dict[str, Any]:
        return {
            "item_id": self._message_id(),
            "output_index": len(self.items),
            "content_index": 0,
        }

    def _message_id(self) -> str:
        """The first message has the response's own number."""
        rank = len(self.items)
        return f"msg_{self._hex_id}_{rank}" if rank else f"msg_{self._hex_id}"

    def _message(self, status: str, content: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        return {
            "id": self._message_id(),
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content or [],
        }


def output_of(
    response_id: str, rules: ToolRules | None, text: str, status: str
) -> list[dict[str, Any]]:
    """The items of an answer that has ended; none if it ended badly before it said anything."""
    output = OutputItems(response_id, rules)
    output.feed(text)
    output.finish(status, needs_item=status == "completed")
    return output.items


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
