"""The vocabulary port: text to ids, ids to bytes. Loads neither torch nor transformers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from pipeline.intake.errors import ModelFilesUnusable
from pipeline.intake.hf_vocabulary import HfVocabulary
from pipeline.script_book import BASE_VOCAB_SIZE, BOS_ID, EOS_ID, SPECIAL_PIECES, ScriptBook

DIGEST_CONTEXT_TOKENS = 512
_PIECE_BYTES = 1 << 16


class Vocabulary(Protocol):
    """What text needs of a model.

    Safe to use from several threads. Special tokens are control tokens: they have no text of their
    own in an answer.
    """

    @property
    def vocab_size(self) -> int:
        """Ids are 0 .. vocab_size - 1; some may stand for nothing."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """What an empty prompt starts from."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together."""
        ...

    @property
    def special_texts(self) -> Sequence[tuple[str, int]]:
        """Control tokens as they look in text, longest first, with their ids."""
        ...

    @property
    def prompt_prefix(self) -> Sequence[int]:
        """Ids that the model wants before a raw prompt (not before a rendered template)."""
        ...

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids of a text, nothing added, in a list of the caller's own.

        `special`: control tokens spelled out in the text become their ids. Otherwise they are
        plain text, as when a user types them.
        """
        ...

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Ids of a text of which control tokens are given by their ids, the rest as plain text.

        They are those of the text in one piece, had nothing in the plain parts been a control token.
        """
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text that has begun; b"" for ids that stand for nothing."""
        ...

    def first_token_bytes(self, token_id: int) -> bytes:
        """The same at the very start of an answer, where SentencePiece drops its word space."""
        ...

    def is_special(self, token_id: int) -> bool:
        """True for control tokens."""
        ...


class ByteVocabulary:
    """The test engines' vocabulary: bytes, four control tokens, the pieces of a script book."""

    def __init__(
        self, pieces: Sequence[bytes] = (), *, max_context: int = DIGEST_CONTEXT_TOKENS
    ) -> None:
        self._bytes = [bytes([value]) for value in range(256)] + [*SPECIAL_PIECES, *pieces]
        self._special = range(BOS_ID, BOS_ID + len(SPECIAL_PIECES))
        self.vocab_size = BASE_VOCAB_SIZE + len(pieces)
        self.bos_token_id: int | None = BOS_ID
        self.eos_token_ids = frozenset({EOS_ID})
        self.max_context = max_context
        self.special_texts: Sequence[tuple[str, int]] = tuple(
            (piece.decode(), BOS_ID + rank) for rank, piece in enumerate(SPECIAL_PIECES)
        )
        self.prompt_prefix: Sequence[int] = ()
        self._ids_of_special = dict(self.special_texts)
        self._special_pattern = re.compile(
            "(" + "|".join(re.escape(text) for text, _ in self.special_texts) + ")"
        )

    def encode(self, text: str, *, special: bool) -> list[int]:
        """See `Vocabulary`: one id per byte, pieces are never used for prompts."""
        ids: list[int] = []
        for part in self._special_pattern.split(text) if special else (text,):
            token_id = self._ids_of_special.get(part)
            if special and token_id is not None:
                ids.append(token_id)
                continue
            data = part.encode()
            # In pieces, between which other threads come to run.
            for start in range(0, len(data), _PIECE_BYTES):
                ids += data[start : start + _PIECE_BYTES]
        return ids

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """See `Vocabulary`."""
        ids: list[int] = []
        for part in parts:
            ids += [part] if isinstance(part, int) else self.encode(part, special=False)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """See `Vocabulary`."""
        return self._bytes[token_id] if token_id < self.vocab_size else b""

    def first_token_bytes(self, token_id: int) -> bytes:
        """See `Vocabulary`: no rule of its own for the start."""
        return self.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """See `Vocabulary`."""
        return token_id in self._special


def load_vocabulary(engine: Literal["torch", "digest", "script"], model: Path | None) -> Vocabulary:
    """The vocabulary of an engine; `model` is its directory, or the script book's file.

    Raises:
        ModelFilesUnusable: the torch engine has no model directory, or its tokenizer is unusable.
        OSError, ValueError: the script book cannot be read.
    """
    if engine == "digest":
        return ByteVocabulary()
    if engine == "script":
        book = ScriptBook.built_in() if model is None else ScriptBook.load(model)
        return ByteVocabulary(book.pieces, max_context=book.context_tokens)
    if model is None:
        raise ModelFilesUnusable(Path("POINTSMAN_MODEL"), "the torch engine needs a directory")
    return HfVocabulary.load(model)
