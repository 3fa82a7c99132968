"""The text of one choice as its tokens arrive, with the tokens that each piece of text stands for."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.intake.detokenizer import Detokenizer
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
    carries that text. Tokens that lie wholly in a stop string never come.
    """

    def __init__(self, vocabulary: Vocabulary, sampling: SamplingParams) -> None:
        self._vocabulary = vocabulary
        self._whole = Detokenizer(vocabulary)
        self._detokenizer = Detokenizer(vocabulary, sampling.stop)
        self._keeps_tokens = sampling.num_logprobs is not None
        self._waiting: list[tuple[TokenRecord, int]] = []
        self._num_seen = 0
        self._num_released = 0

    def feed(self, record: TokenRecord) -> TextPiece | None:
        """The piece that this token lets go, or None while its text is held (or it has none)."""
        if self._detokenizer.is_stopped:
            return None
        text = self._detokenizer.feed(record.token_id)
        if not self._keeps_tokens:
            return TextPiece(text, (), ()) if text else None
        if not self._vocabulary.is_special(record.token_id):
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
