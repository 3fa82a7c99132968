"""Server-sent events, byte by byte.

On the OpenAI routes an event is one line `data: ` + JSON and an empty line, nothing else: clients
break on ids, event names, comments and carriage returns. Characters at which line readers split
(U+0085, U+2028, U+2029) are escaped.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import orjson

from gateway.http_errors import refusal_from
from pipeline.errors import PipelineError
from pipeline.intake.answer_text import AnswerText
from pipeline.intake.build import Generation
from pipeline.intake.errors import RequestRefused
from pipeline.intake.response import AnswerShape
from pipeline.intake.vocabulary import Vocabulary
from pipeline.protocol.stream import (
    PromptScored,
    RequestUsage,
    StreamEnded,
    StreamEvent,
    TokensArrived,
)

DONE = b"data: [DONE]\n\n"
_SPLITTERS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)


def event_bytes(data: Mapping[str, Any], event_id: int | None = None) -> bytes:
    """One event; with an id only on our own routes."""
    line = orjson.dumps(data)
    for raw, escaped in _SPLITTERS:
        line = line.replace(raw, escaped)
    head = b"" if event_id is None else b"id: %d\n" % event_id
    return head + b"data: " + line + b"\n\n"


class EventWriter(Protocol):
    """Turns the events of a stream into bytes, and knows when the stream is complete."""

    @property
    def is_complete(self) -> bool:
        """True once [DONE] was handed out."""
        ...

    @property
    def has_failed(self) -> bool:
        """True when the stream was ended by an error event."""
        ...

    def feed(self, index: int, event: StreamEvent) -> bytes:
        """Bytes for an event of choice `index`; b"" when there is nothing to show."""
        ...

    def fail(self, error: RequestRefused) -> bytes:
        """The error event and [DONE]; b"" when the stream is complete."""
        ...


class ChunkWriter:
    """Chunks of a chat or completions stream.

    The role chunk, or the echoed prompt, goes out with the first token of its choice. Every token
    that shows text is one event; all events at hand are one write. Each choice has one finish
    chunk; after the last one come the usage chunk, if asked for, and [DONE].
    """

    def __init__(self, generation: Generation, vocabulary: Vocabulary) -> None:
        requests = generation.requests
        self._shape = AnswerShape(generation, vocabulary)
        self._texts = [
            AnswerText(vocabulary, request.sampling, generation.echo_of(index))
            for index, request in enumerate(requests)
        ]
        self._opened = [False] * len(requests)
        self._usages: list[RequestUsage | None] = [None] * len(requests)
        self._includes_usage = generation.includes_usage
        self.is_complete = False
        self.has_failed = False

    def feed(self, index: int, event: StreamEvent) -> bytes:
        """See `EventWriter`."""
        if self.is_complete:
            return b""
        if isinstance(event, PromptScored):
            return self._open(index, event)
        opening = self._open(index)
        if isinstance(event, TokensArrived):
            return opening + self._tokens(index, event)
        try:
            return opening + self._ending(index, event)
        except RequestRefused as refused:
            return self.fail(refused)

    def fail(self, error: RequestRefused) -> bytes:
        """See `EventWriter`."""
        if self.is_complete:
            return b""
        self.is_complete = self.has_failed = True
        return event_bytes(error.in_stream()) + DONE

    def _open(self, index: int, scored: PromptScored | None = None) -> bytes:
        """The role of a chat, or the prompt that a completion echoes."""
        if self._opened[index]:
            return b""
        self._opened[index] = True
        echo = self._texts[index].begin(None if scored is None else scored.records)
        if echo is not None:
            return _joined(self._shape.text_chunks(index, echo))
        chunk = self._shape.role_chunk(index)
        return b"" if chunk is None else event_bytes(chunk)

    def _tokens(self, index: int, event: TokensArrived) -> bytes:
        data = []
        for record in event.records:
            self._shape.num_tokens += 1
            piece = self._texts[index].feed(record)
            if piece is not None:
                data.append(_joined(self._shape.text_chunks(index, piece)))
        return b"".join(data)

    def _ending(self, index: int, event: StreamEnded) -> bytes:
        piece = self._texts[index].finish()
        data = _joined(self._shape.finish_chunks(index, event.ending, piece))
        self._usages[index] = event.usage
        if None in self._usages:
            return data
        self.is_complete = True
        if self._includes_usage:
            data += event_bytes(self._shape.usage_chunk(self._usages))
        return data + DONE


def _joined(chunks: Sequence[Mapping[str, Any]]) -> bytes:
    return b"".join([event_bytes(chunk) for chunk in chunks])


async def event_stream(
    events: AsyncGenerator[tuple[int, StreamEvent], None], writer: EventWriter
) -> AsyncGenerator[bytes, None]:
    """Bytes to send, one item a write. A pipeline error becomes the stream's error event."""
    try:
        async with aclosing(events):
            async for index, event in events:
                data = writer.feed(index, event)
                if data:
                    yield data
                if writer.is_complete:
                    return
    except PipelineError as error:
        yield writer.fail(refusal_from(error))
