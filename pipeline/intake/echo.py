"""The prompt as an answer shows it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.intake.detokenizer import Detokenizer, TextRules
from pipeline.intake.vocabulary import Vocabulary
from pipeline.protocol.tokens import TokenRecord


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt's text and its tokens; the first `num_hidden` tokens have no part in the text.

    Text that a client sent comes back as it was, tokens as what they spell, control tokens
    included.
    """

    text: str
    tokens: tuple[int, ...]
    num_hidden: int = 0

    @classmethod
    def of_tokens(cls, tokens: Sequence[int], vocabulary: Vocabulary) -> EchoedPrompt:
        """A prompt that came as token ids."""
        detokenizer = Detokenizer(vocabulary, TextRules(shows_special=True))
        text = "".join([detokenizer.feed(token_id) for token_id in tokens])
        return cls(text + detokenizer.finish(), tuple(tokens))

    def records(self, scores: Sequence[TokenRecord]) -> tuple[TokenRecord, ...]:
        """One record per token; the first has no log-probability, for nothing precedes it."""
        return (TokenRecord(self.tokens[0]), *scores)

    def offsets(self, vocabulary: Vocabulary) -> tuple[int, ...]:
        """Where each token begins in the text, in characters."""
        detokenizer = Detokenizer(vocabulary, TextRules(shows_special=True))
        offsets: list[int] = []
        num_chars = 0
        for number, token_id in enumerate(self.tokens):
            offsets.append(min(num_chars, len(self.text)))
            if number >= self.num_hidden:
                num_chars += len(detokenizer.feed(token_id))
        return tuple(offsets)
