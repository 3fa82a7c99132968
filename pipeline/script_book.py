"""The script book: what the script engine says, and the vocabulary that the test engines speak.

The gateway builds its text vocabulary from here and the worker its logits, so both agree on ids
without a tokenizer: ids 0..255 are single bytes, four special tokens follow, then the distinct
longer pieces of the book in file order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

BOS_ID = 256
EOS_ID = 257
IM_START_ID = 258
IM_END_ID = 259
SPECIAL_PIECES = (b"<bos>", b"<eos>", b"<|im_start|>", b"<|im_end|>")
BASE_VOCABULARY: tuple[bytes, ...] = (*(bytes([byte]) for byte in range(256)), *SPECIAL_PIECES)
BASE_VOCAB_SIZE = len(BASE_VOCABULARY)  # the digest engine's whole vocabulary
DEFAULT_SCRIPT = "default"

_NAME_IN_PROMPT = re.compile(rb"\[\[([^\[\]]+)\]\]")
_LEAST_LOGPROB = -5.0  # below, another token of a 260-word vocabulary would be more likely


class HexPiece(BaseModel):
    """A piece given as bytes, for text that is cut inside a character."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hex: str

    @field_validator("hex")
    @classmethod
    def _is_hex(cls, value: str) -> str:
        bytes.fromhex(value)
        return value


class Script(BaseModel):
    """One answer: a token per piece, then end-of-text.

    With `ends` false the last piece is repeated for ever. `logprob` is the log-probability of every
    token of the script; at 0 no other token can be sampled at any temperature, below 0 only greedy
    sampling follows the script for certain. Delays are those of one engine step.

    Raises:
        ValueError: a piece is empty, or an endless script has none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pieces: tuple[str | HexPiece, ...]
    prefill_delay_ms: float = Field(default=0.0, ge=0.0)
    token_delay_ms: float = Field(default=0.0, ge=0.0)
    logprob: float = Field(default=0.0, ge=_LEAST_LOGPROB, le=0.0)
    ends: bool = True

    @model_validator(mode="after")
    def _can_be_spoken(self) -> Self:
        if not all(self.piece_bytes):
            raise ValueError("a piece has at least one byte")
        if not self.ends and not self.pieces:
            raise ValueError("a script that does not end has at least one piece")
        return self

    @cached_property
    def piece_bytes(self) -> tuple[bytes, ...]:
        """The pieces as bytes, text in UTF-8."""
        return tuple(
            bytes.fromhex(piece.hex) if isinstance(piece, HexPiece) else piece.encode()
            for piece in self.pieces
        )


class ScriptBook(BaseModel):
    """All scripts of a test engine by name; `default` answers prompts that name none.

    A prompt names its script as `[[name]]`; the last known name wins, so that in a chat the newest
    message decides.

    Raises:
        ValueError: there is no script called `default`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    context_tokens: int = Field(default=512, ge=2)
    scripts: dict[str, Script]

    @model_validator(mode="after")
    def _has_default(self) -> Self:
        if DEFAULT_SCRIPT not in self.scripts:
            raise ValueError(f"a script book has a script called {DEFAULT_SCRIPT!r}")
        return self

    @classmethod
    def load(cls, path: Path) -> ScriptBook:
        """Read a book from a JSON file.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is no script book (pydantic's message names the place).
        """
        return cls.model_validate_json(path.read_bytes())

    @classmethod
    def built_in(cls) -> ScriptBook:
        """The book of an engine that was given none."""
        return cls(scripts={DEFAULT_SCRIPT: Script(pieces=("Hello", ",", " world", "!"))})

    @cached_property
    def pieces(self) -> tuple[bytes, ...]:
        """The distinct pieces of two bytes and more; `pieces[i]` has the id BASE_VOCAB_SIZE + i."""
        return tuple(dict.fromkeys(piece for piece in self._all_pieces() if len(piece) > 1))

    @cached_property
    def vocabulary(self) -> tuple[bytes, ...]:
        """Bytes of every token id."""
        return BASE_VOCABULARY + self.pieces

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self.vocabulary)

    def token_ids(self, script_name: str) -> tuple[int, ...]:
        """Ids of a script's pieces, without end-of-text.

        Raises:
            KeyError: no script has this name.
        """
        return tuple(
            piece[0] if len(piece) == 1 else self._piece_ids[piece]
            for piece in self.scripts[script_name].piece_bytes
        )

    def script_name(self, prompt: bytes) -> str:
        """Name of the script that answers a prompt."""
        names = [name.decode(errors="replace") for name in _NAME_IN_PROMPT.findall(prompt)]
        return next((name for name in reversed(names) if name in self.scripts), DEFAULT_SCRIPT)

    @cached_property
    def _piece_ids(self) -> dict[bytes, int]:
        return {piece: BASE_VOCAB_SIZE + rank for rank, piece in enumerate(self.pieces)}

    def _all_pieces(self) -> Iterator[bytes]:
        for script in self.scripts.values():
            yield from script.piece_bytes
