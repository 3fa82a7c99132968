"""The event stream of a job: one event per token, resumable by the token's index."""

from __future__ import annotations

from typing import Any

from gateway.sse import DONE, event_bytes
from pipeline.intake.answer_text import AnswerText, TextPiece
from pipeline.intake.errors import InvalidField, RequestRefused, refusal_of
from pipeline.intake.response import usage_object
from pipeline.intake.tool_calls import ToolCall, ToolCallReader
from pipeline.intake.vocabulary import Vocabulary
from pipeline.protocol.failure import FinishReason
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.stream import PromptScored, StreamEvent, TokensArrived
from pipeline.protocol.tokens import TokenRecord

_MAX_INDEX_DIGITS = 9


class JobWriter:
    """Events `id: <index>` + `{"index", "text"}` for every token, then one with the finish reason.

    The last event has the index after the last token, the text that was held to the end,
    `finish_reason` (`stop`, `length`, `tool_calls`, `cancelled`) and `usage`. A token whose text is held
    has the text "". With `reader` calls of tools are taken out of the text: the token that completes one
    brings it, in `tool_calls`. Events up to `after` are not sent, but must be fed: text depends on
    all tokens.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        sampling: SamplingParams,
        after: int = -1,
        reader: ToolCallReader | None = None,
    ) -> None:
        self._reader = reader
        self._text = AnswerText(vocabulary, sampling.model_copy(update={"num_logprobs": None}))
        self._after = after
        self._next_index = 0
        self.is_complete = False
        self.has_failed = False

    def feed(self, index: int, event: StreamEvent) -> bytes:
        """See `gateway.sse.EventWriter`. A job scores no prompt."""
        if isinstance(event, PromptScored):
            return b""
        if isinstance(event, TokensArrived):
            return b"".join(self._token(record) for record in event.records)
        refused = refusal_of(event.ending)
        if refused is not None and event.ending.reason is not FinishReason.CANCELLED:
            return self.fail(refused)
        parts = self._parts(self._text.finish())
        reason = str(event.ending.reason)
        if self._reader is not None:
            parts += self._reader.finish()
            reason = self._reader.reason(reason)
        self.is_complete = True
        return (
            self._event(parts, {"finish_reason": reason, "usage": usage_object(event.usage)}) + DONE
        )

    def fail(self, error: RequestRefused) -> bytes:
        """See `gateway.sse.EventWriter`."""
        if self.is_complete:
            return b""
        self.is_complete = self.has_failed = True
        return event_bytes(error.in_stream()) + DONE

    def _token(self, record: TokenRecord) -> bytes:
        return self._event(self._parts(self._text.feed(record)), {})

    def _parts(self, piece: TextPiece | None) -> list[str | ToolCall]:
        if piece is None:
            return []
        return [piece.text] if self._reader is None else self._reader.feed(piece.text)

    def _event(self, parts: list[str | ToolCall], fields: dict[str, Any]) -> bytes:
        index = self._next_index
        self._next_index += 1
        if index <= self._after:
            return b""
        text = "".join(part for part in parts if isinstance(part, str))
        calls = [part.as_delta() for part in parts if isinstance(part, ToolCall)]
        if calls:
            fields = {"tool_calls": calls, **fields}
        return event_bytes({"index": index, "text": text, **fields}, event_id=index)


def resume_point(last_event_id: str | None, starting_after: str | None) -> int:
    """Index of the last event the client has; -1 for none. The header wins over the query.

    Raises:
        InvalidField: it is no index.
    """
    given = last_event_id or starting_after
    if not given:
        return -1
    if not (given.isascii() and given.isdigit()) or len(given) > _MAX_INDEX_DIGITS:
        name = "Last-Event-ID" if last_event_id else "starting_after"
        raise InvalidField(name, f"{name} must be the id of an event of this stream.")
    return int(given)
