"""The text of one choice as its tokens arrive, with the tokens that each piece of text stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.intake.detokenizer import Detokenizer, TextRules
from pipeline.intake.echo import EchoedPrompt
from pipeline.intake.vocabulary import Vocabulary
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.tokens import TokenRecord


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that was let go, and the tokens whose text it ends.

    `offsets[i]` is where tokens[i] begins in the choice's text, in characters.
    """

    text: str
    tokens: tuple[TokenRecord, ...]
    offsets: tuple[int, ...]


class AnswerText:
    """Detokenizes one choice and keeps text and tokens together.

    Tokens whose text is held (half a character, a possible stop string) come with the piece that
    carries that text. Tokens that lie wholly in a stop string never come. With `echo` the text
    begins with the prompt, which `begin` lets go.
    """

    def __init__(
        self, vocabulary: Vocabulary, sampling: SamplingParams, echo: EchoedPrompt | None = None
    ) -> None:
        rules = TextRules.of(sampling)
        self._vocabulary = vocabulary
        self._echo = echo
        self._shows_special = rules.shows_special
        self._whole = Detokenizer(vocabulary, replace(rules, stop=()))
        self._detokenizer = Detokenizer(vocabulary, rules)
        self._keeps_tokens = sampling.num_logprobs is not None
        self._waiting: list[tuple[TokenRecord, int]] = []
        self._num_seen = 0 if echo is None else len(echo.text)
        self._num_released = self._num_seen

    def begin(self, scores: Sequence[TokenRecord] | None = None) -> TextPiece | None:
        """The echoed prompt, with its tokens if they were scored; once, before any token."""
        echo, self._echo = self._echo, None
        if echo is None:
            return None
        if scores is None:
            return TextPiece(echo.text, (), ())
        return TextPiece(echo.text, echo.records(scores), echo.offsets(self._vocabulary))

    def feed(self, record: TokenRecord) -> TextPiece | None:
        """The piece that this token lets go, or None while its text is held (or it has none)."""
        if self._detokenizer.is_stopped:
            return None
        text = self._detokenizer.feed(record.token_id)
        if not self._keeps_tokens:
            return TextPiece(text, (), ()) if text else None
        if self._shows_special or not self._vocabulary.is_special(record.token_id):
            self._waiting.append((record, self._num_seen))
        self._num_seen += len(self._whole.feed(record.token_id))
        return self._piece(text) if text else None

    def finish(self) -> TextPiece | None:
        """What was still held, at the end."""
        text = self._detokenizer.finish()
        return self._piece(text) if text else None

    def _piece(self, text: str) -> TextPiece:
        self._num_released += len(text)
        taken = [pair for pair in self._waiting if pair[1] < self._num_released]
        self._waiting = self._waiting[len(taken) :]
        return TextPiece(text, tuple(pair[0] for pair in taken), tuple(pair[1] for pair in taken))
