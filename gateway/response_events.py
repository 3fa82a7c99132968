"""The event stream of a response: numbered the same at every reading, so that it can be resumed.

Numbers: 0 created, 1 in progress, 2 and 3 open the message, token i of the answer has 4 + i, and after
the last token come the text that was held, and four that close. A token whose text is held sends no
event; its number is left out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from gateway.response_object import ResponseHead, part, status_of
from gateway.sse import event_bytes, event_stream
from pipeline.intake.answer_text import AnswerText
from pipeline.intake.errors import RequestRefused
from pipeline.intake.vocabulary import Vocabulary
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.stream import PromptScored, StreamEnded, StreamEvent, TokensArrived
from pipeline.protocol.tokens import TokenRecord


class ResponseWriter:
    """Writes the events behind the number `after`; all must be fed, for text depends on all tokens."""

    def __init__(
        self,
        head: ResponseHead,
        vocabulary: Vocabulary,
        sampling: SamplingParams,
        after: int = -1,
    ) -> None:
        self._head = head
        self._text = AnswerText(vocabulary, sampling)
        self._pieces: list[str] = []
        self._after = after
        self._next = 0
        self._has_opened = False
        self.is_complete = False
        self.has_failed = False

    def begin(self) -> bytes:
        """The first event, which tells the id; sent before anything is computed."""
        status = "queued" if self._head.card.is_background else "in_progress"
        return self._event("response.created", {"response": self._head.unfinished(status)})

    def feed(self, index: int, event: StreamEvent) -> bytes:
        """See `gateway.sse.EventWriter`."""
        if isinstance(event, PromptScored) or self.is_complete:
            return b""
        opening = self._open()
        if isinstance(event, TokensArrived):
            return opening + b"".join([self._token(record) for record in event.records])
        return opening + self._end(event)

    def fail(self, error: RequestRefused) -> bytes:
        """See `gateway.sse.EventWriter`; the response itself may go on."""
        if self.is_complete:
            return b""
        self.is_complete = self.has_failed = True
        fields = {"code": error.code, "message": error.message, "param": error.param}
        self._after = -1  # whatever the client has, this is new
        return self._event("error", fields)

    def _open(self) -> bytes:
        if self._has_opened:
            return b""
        self._has_opened = True
        head = self._head
        return b"".join(
            (
                self._event("response.in_progress", {"response": head.unfinished("in_progress")}),
                self._event(
                    "response.output_item.added",
                    {"output_index": 0, "item": head.item(None, "in_progress")},
                ),
                self._event("response.content_part.added", self._place() | {"part": part("")}),
            )
        )

    def _token(self, record: TokenRecord) -> bytes:
        piece = self._text.feed(record)
        return self._delta("" if piece is None else piece.text)

    def _delta(self, text: str) -> bytes:
        self._pieces.append(text)
        if not text:
            self._next += 1
            return b""
        fields = self._place() | {"delta": text, "logprobs": []}
        return self._event("response.output_text.delta", fields)

    def _end(self, event: StreamEnded) -> bytes:
        held = self._text.finish()
        data = self._delta("" if held is None else held.text)
        text = "".join(self._pieces)
        status = status_of(event.ending)
        self.is_complete = True
        self.has_failed = status == "failed"
        response = self._head.ended(text, event.ending, event.usage)
        item = self._head.item(text, "completed" if status == "completed" else "incomplete")
        return b"".join(
            (
                data,
                self._event(
                    "response.output_text.done", self._place() | {"text": text, "logprobs": []}
                ),
                self._event("response.content_part.done", self._place() | {"part": part(text)}),
                self._event("response.output_item.done", {"output_index": 0, "item": item}),
                self._event(f"response.{status}", {"response": response}),
            )
        )

    def _place(self) -> dict[str, Any]:
        item_id = self._head.item(None, "")["id"]
        return {"item_id": item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        number = self._next
        self._next += 1
        if number <= self._after:
            return b""
        data = event_bytes({"type": kind, "sequence_number": number, **fields})
        return b"event: %s\n" % kind.encode() + data


async def response_stream(
    events: AsyncGenerator[tuple[int, StreamEvent], None], writer: ResponseWriter
) -> AsyncGenerator[bytes, None]:
    """Bytes to send, one item a write."""
    data = writer.begin()
    if data:
        yield data
    async for part_of_it in event_stream(events, writer):
        yield part_of_it
