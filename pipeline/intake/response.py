"""Answers in OpenAI's shapes: whole ones and chunks, as plain dicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.intake.answer_text import AnswerText, TextPiece
from pipeline.intake.build import AnswerKind, Generation
from pipeline.intake.echo import EchoedPrompt
from pipeline.intake.errors import refusal_of
from pipeline.intake.logprob_format import chat_logprobs, completion_logprobs
from pipeline.intake.tool_calls import ToolCall, ToolCallReader, said_with_calls, split_calls
from pipeline.intake.vocabulary import Vocabulary
from pipeline.protocol.failure import Ending, FinishReason
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.stream import (
    PromptScored,
    RequestUsage,
    StreamEvent,
    TokensArrived,
)
from pipeline.protocol.tokens import TokenRecord

_OBJECTS = {
    AnswerKind.CHAT: ("chat.completion", "chat.completion.chunk"),
    AnswerKind.COMPLETION: ("text_completion", "text_completion"),
}


@dataclass(slots=True)
class ChoiceOutcome:
    """All that one choice came to."""

    text: str = ""
    tokens: list[TokenRecord] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    ending: Ending | None = None
    usage: RequestUsage | None = None


class ChoiceCollector:
    """Gathers the events of one request into an outcome."""

    def __init__(
        self,
        sampling: SamplingParams,
        vocabulary: Vocabulary,
        echo: EchoedPrompt | None = None,
    ) -> None:
        self._text = AnswerText(vocabulary, sampling, echo)
        self.outcome = ChoiceOutcome()

    def feed(self, event: StreamEvent) -> None:
        """Take the next event of the request's stream."""
        self._take(self._text.begin(event.records if isinstance(event, PromptScored) else None))
        if isinstance(event, PromptScored):
            return
        if isinstance(event, TokensArrived):
            for record in event.records:
                self._take(self._text.feed(record))
            return
        self._take(self._text.finish())
        self.outcome.ending = event.ending
        self.outcome.usage = event.usage

    def _take(self, piece: TextPiece | None) -> None:
        if piece is not None:
            self.outcome.text += piece.text
            self.outcome.tokens += piece.tokens
            self.outcome.offsets += piece.offsets


class AnswerShape:
    """Writes the answer of one chat or completions generation."""

    def __init__(self, generation: Generation, vocabulary: Vocabulary) -> None:
        self._generation = generation
        self._vocabulary = vocabulary
        self._is_chat = generation.kind is AnswerKind.CHAT
        self._whole_object, self._chunk_object = _OBJECTS[generation.kind]
        self.num_tokens = 0  # of a stream, so far; for chunks that tell the usage
        rules = generation.tools
        self._readers: list[ToolCallReader] = []
        if rules is not None:
            ids = [request.request_id for request in generation.requests]
            self._readers = [ToolCallReader(rules, choice_id) for choice_id in ids]
        self._unshown: dict[int, list[TokenRecord]] = {}  # of text that a reader holds
        self._has_logprobs = generation.requests[0].sampling.num_logprobs is not None

    def whole(self, outcomes: Sequence[ChoiceOutcome]) -> dict[str, Any]:
        """The answer when every choice has ended.

        Raises:
            RequestFailed, RequestCancelled: a choice did not end normally.
        """
        choices = []
        for index, outcome in enumerate(outcomes):
            piece = TextPiece(outcome.text, tuple(outcome.tokens), tuple(outcome.offsets))
            reason = finish_reason(outcome.ending)
            if self._is_chat:
                message, num_calls = self._message(index, outcome.text)
                reason = self._reason(reason, num_calls)
                choice: dict[str, Any] = {"index": index, "message": message}
            else:
                choice = {"index": index, "text": outcome.text}
            choice["logprobs"] = self._logprobs(piece)
            choice["finish_reason"] = reason
            choices.append(choice)
        answer = self._frame(self._whole_object, choices)
        answer["usage"] = self.usage([outcome.usage for outcome in outcomes])
        return answer

    def role_chunk(self, index: int) -> dict[str, Any] | None:
        """What opens a choice: the role in a chat, nothing in completions."""
        if not self._is_chat:
            return None
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def text_chunks(self, index: int, piece: TextPiece) -> list[dict[str, Any]]:
        """The next piece of a choice's text; with tools none, if it may belong to a call."""
        if self._readers:
            return self._part_chunks(index, self._readers[index].feed(piece.text), piece.tokens)
        return [self._chunk(index, self._delta(piece.text), self._logprobs(piece), None)]

    def finish_chunks(
        self, index: int, ending: Ending | None, piece: TextPiece | None
    ) -> list[dict[str, Any]]:
        """The last chunks of a choice, with what was held to the end.

        Raises:
            RequestFailed, RequestCancelled: the choice did not end normally.
        """
        reason = finish_reason(ending)
        if not self._readers:
            delta: dict[str, Any] | str = {} if self._is_chat else ""
            logprobs = None
            if piece is not None:
                delta, logprobs = self._delta(piece.text), self._logprobs(piece)
            return [self._chunk(index, delta, logprobs, reason)]
        reader = self._readers[index]
        text, tokens = ("", ()) if piece is None else (piece.text, piece.tokens)
        chunks = self._part_chunks(index, [*reader.feed(text), *reader.finish()], tokens)
        logprobs = self._logprobs(TextPiece("", tuple(self._unshown.pop(index, ())), ()))
        return [*chunks, self._chunk(index, {}, logprobs, self._reason(reason, reader.num_calls))]

    def _part_chunks(
        self, index: int, parts: Sequence[str | ToolCall], tokens: Sequence[TokenRecord]
    ) -> list[dict[str, Any]]:
        """A chunk for each part; the first has the log-probabilities of all tokens up to here."""
        self._unshown.setdefault(index, []).extend(tokens)
        chunks = []
        for part in parts:
            delta: dict[str, Any] | str
            if isinstance(part, ToolCall):
                delta = {"tool_calls": [part.as_delta()]}
            else:
                delta = self._delta(part)
            piece = TextPiece("", tuple(self._unshown.pop(index, ())), ())
            chunks.append(self._chunk(index, delta, self._logprobs(piece), None))
        return chunks

    def _delta(self, text: str) -> dict[str, Any] | str:
        return {"content": text} if self._is_chat else text

    def _message(self, index: int, text: str) -> tuple[dict[str, Any], int]:
        """The assistant's message, and how many calls are in it."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        choice_id = self._generation.requests[index].request_id
        said, calls = split_calls(text, self._generation.tools, choice_id)
        return message | said_with_calls(said, calls), len(calls)

    def _reason(self, reason: str, num_calls: int) -> str:
        rules = self._generation.tools
        return reason if rules is None else rules.reason(reason, num_calls)

    def usage_chunk(self, usages: Sequence[RequestUsage | None]) -> dict[str, Any]:
        """The chunk of `include_usage`: no choices."""
        return {**self._frame(self._chunk_object, []), "usage": self.usage(usages)}

    def usage(self, usages: Sequence[RequestUsage | None]) -> dict[str, Any]:
        """Token counts of all choices; each prompt counts once, cached as its first choice saw it."""
        known = [usage or RequestUsage(0, 0, 0) for usage in usages]
        firsts = known[:: self._generation.choices_per_prompt]
        return usage_object(
            RequestUsage(
                prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
                completion_tokens=sum(usage.completion_tokens for usage in known),
                cached_tokens=sum(usage.cached_tokens for usage in firsts),
            )
        )

    def _logprobs(self, piece: TextPiece) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        if self._is_chat:
            return chat_logprobs(piece.tokens, self._vocabulary)
        return completion_logprobs(piece.tokens, piece.offsets, self._vocabulary)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any] | str,
        logprobs: dict[str, Any] | None,
        reason: str | None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta" if self._is_chat else "text": delta,
            "logprobs": logprobs,
            "finish_reason": reason,
        }
        chunk = self._frame(self._chunk_object, [choice])
        if self._generation.includes_usage:
            chunk["usage"] = self._usage_so_far() if self._generation.counts_usage else None
        return chunk

    def _usage_so_far(self) -> dict[str, int]:
        requests = self._generation.requests[:: self._generation.choices_per_prompt]
        num_prompt = sum(len(request.prompt_tokens) for request in requests)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_tokens,
            "total_tokens": num_prompt + self.num_tokens,
        }

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        frame = {
            "id": self._generation.answer_id,
            "object": kind,
            "created": self._generation.created_s,
            "model": self._generation.model,
            "choices": choices,
        }
        if self._generation.fingerprint:
            frame["system_fingerprint"] = self._generation.fingerprint
        if self._generation.service_tier is not None:
            frame["service_tier"] = self._generation.service_tier
        return frame


def usage_object(usage: RequestUsage) -> dict[str, Any]:
    """OpenAI's usage of one request."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def finish_reason(ending: Ending | None) -> str:
    """`stop` or `length`.

    Raises:
        RequestFailed, RequestCancelled: the request did not end normally.
    """
    ending = ending or Ending(reason=FinishReason.STOP)
    refused = refusal_of(ending)
    if refused is not None:
        raise refused
    return str(ending.reason)
