"""The event stream of a response: numbered the same at every reading, so that it can be resumed.

Numbers: 0 created, 1 in progress, then what each token brings about, which depends on the tokens before
it and nothing else. A token that brings about nothing has a number too, which is left out. Without
tools 2 and 3 open the message, so that token i of the answer has 4 + i.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from gateway.response_items import OutputItems, Step
from gateway.response_object import ResponseHead, status_of
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
        self._output = OutputItems(head.response_id, head.card.rules)
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
        response = self._head.unfinished("in_progress")
        opening = self._event("response.in_progress", {"response": response})
        return opening + (b"" if self._output.has_calls else self._steps(self._output.open()))

    def _token(self, record: TokenRecord) -> bytes:
        piece = self._text.feed(record)
        return self._said("" if piece is None else piece.text)

    def _said(self, text: str) -> bytes:
        self._pieces.append(text)
        steps = self._output.feed(text)
        self._next += not steps
        return self._steps(steps)

    def _end(self, event: StreamEnded) -> bytes:
        held = self._text.finish()
        data = self._said("" if held is None else held.text)
        status = status_of(event.ending)
        self.is_complete = True
        self.has_failed = status == "failed"
        needs_item = not self._output.has_calls or status == "completed"
        data += self._steps(self._output.finish(status, needs_item=needs_item))
        response = self._head.ended("".join(self._pieces), event.ending, event.usage)
        return data + self._event(f"response.{status}", {"response": response})

    def _steps(self, steps: list[Step]) -> bytes:
        return b"".join([self._event(kind, fields) for kind, fields in steps])

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
