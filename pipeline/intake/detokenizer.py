"""Token ids to text as it comes: whole characters only, and never a piece of a stop string."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from pipeline.intake.vocabulary import Vocabulary
from pipeline.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class TextRules:
    """How an answer's tokens become text.

    stop: a stop string and what follows it never come out; `shows_stop` lets the string itself out.
    Text of the first `min_tokens` tokens stops nothing. `continues_text`: the answer goes on after
    text that is shown before it, so that its first token keeps its word space.
    """

    stop: tuple[str, ...] = ()
    shows_stop: bool = False
    shows_special: bool = False
    min_tokens: int = 0
    continues_text: bool = False

    @classmethod
    def of(cls, sampling: SamplingParams) -> TextRules:
        """Those of a request; the same in worker and gateway."""
        return cls(
            stop=sampling.stop,
            shows_stop=sampling.include_stop_str_in_output,
            shows_special=not sampling.skip_special_tokens,
            min_tokens=sampling.min_tokens,
            continues_text=sampling.echo or sampling.continues_text,
        )


class Detokenizer:
    """One answer's text.

    `feed` returns the text that a token lets go. A character that is cut between tokens is held until
    it is whole (or proven bad: then U+FFFD), and text that could be the start of a stop string until
    it is not.
    """

    def __init__(self, vocabulary: Vocabulary, rules: TextRules | None = None) -> None:
        rules = rules or TextRules()
        self._vocabulary = vocabulary
        self._rules = rules
        self._stop = tuple(text for text in rules.stop if text)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._has_begun = rules.continues_text
        self._num_fed = 0
        self.is_stopped = False

    def feed(self, token_id: int) -> str:
        """Text released by the next token, often all of its own; "" while something is held."""
        if self.is_stopped:
            return ""
        self._num_fed += 1
        if not self._rules.shows_special and self._vocabulary.is_special(token_id):
            return ""
        if self._has_begun:
            data = self._vocabulary.token_bytes(token_id)
        else:
            data = self._vocabulary.first_token_bytes(token_id)
            self._has_begun = True
        return self._release(self._decoder.decode(data))

    def finish(self) -> str:
        """What is still held, at the end; a character that was never completed is U+FFFD."""
        if self.is_stopped:
            return ""
        text, self._held = self._held + self._decoder.decode(b"", final=True), ""
        return text

    def _release(self, text: str) -> str:
        if not self._stop:
            return text
        text = self._held + text
        if self._num_fed > self._rules.min_tokens:
            found = [(text.find(stop), len(stop)) for stop in self._stop if stop in text]
            if found:
                self.is_stopped = True
                self._held = ""
                start, num_chars = min(found)
                return text[: start + num_chars if self._rules.shows_stop else start]
        num_held = max(num_could_begin(text, stop) for stop in self._stop)
        split = len(text) - num_held
        self._held = text[split:]
        return text[:split]


class StopMatcher:
    """Tells the worker, token by token, when a stop string is complete in the output."""

    def __init__(self, vocabulary: Vocabulary, rules: TextRules) -> None:
        self._detokenizer = Detokenizer(vocabulary, rules)

    def feed(self, token_id: int) -> bool:
        """True from the token on that completes a stop string."""
        self._detokenizer.feed(token_id)
        return self._detokenizer.is_stopped


def num_could_begin(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper start of `stop`."""
    for num_chars in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:num_chars]):
            return num_chars
    return 0
