"""What the digest engine has to say, from its rule alone: no blocks, no batches, no engine, no NumPy."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

import xxhash

_ENTRY_BYTES = 32
_FIRST_PRINTABLE, _NUM_PRINTABLE = 32, 95
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


class DigestReference:
    """One conversation: tokens go in, and each next token of a greedy answer follows from all of them."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._entries = b""
        for token in tokens:
            self.add(token)

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._entries) // _ENTRY_BYTES

    def add(self, token: int) -> None:
        """Take one more token: its entry is chained to that of the one before."""
        previous = self._entries[-_ENTRY_BYTES:] or bytes(_ENTRY_BYTES)
        data = previous + struct.pack("<qq", token, self.num_tokens)
        self._entries += hashlib.blake2b(data, digest_size=_ENTRY_BYTES).digest()

    def next_token(self) -> int:
        """The likeliest one."""
        digest = xxhash.xxh3_64_intdigest(self._entries, seed=self.num_tokens)
        ranks = [_mixed(digest + _GOLDEN * column) >> 40 for column in range(1, 1 + _NUM_PRINTABLE)]
        return _FIRST_PRINTABLE + max(range(_NUM_PRINTABLE), key=ranks.__getitem__)

    def answer(self, num_tokens: int) -> list[int]:
        """The next tokens; they are part of the conversation then."""
        answer: list[int] = []
        for _ in range(num_tokens):
            answer.append(self.next_token())
            self.add(answer[-1])
        return answer


def _mixed(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood, 2014)."""
    value &= _MASK
    value = (value ^ (value >> 30)) * _MIX_1 & _MASK
    value = (value ^ (value >> 27)) * _MIX_2 & _MASK
    return value ^ (value >> 31)
