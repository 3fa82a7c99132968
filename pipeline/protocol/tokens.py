"""One generated token as a fixed-size record of the token log."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_ID = struct.Struct("<I")
_CHOSEN = struct.Struct("<If")


class TokenRecord(NamedTuple):
    """A token id and, where asked, log-probabilities (natural log).

    `top` holds the most likely (token id, log-probability) pairs, best first.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def record_bytes(num_logprobs: int | None) -> int:
    """Size of one record: the id alone, or id, log-probability and `num_logprobs` pairs."""
    return _ID.size if num_logprobs is None else _CHOSEN.size * (1 + num_logprobs)


def pack_records(records: Sequence[TokenRecord], num_logprobs: int | None) -> bytes:
    """Records back to back, little-endian: index i starts at byte i * record_bytes(num_logprobs).

    Raises:
        ValueError: a record lacks the log-probabilities that were asked for.
    """
    if num_logprobs is None:
        return b"".join(_ID.pack(record.token_id) for record in records)
    parts: list[bytes] = []
    for record in records:
        if record.logprob is None or len(record.top) != num_logprobs:
            raise ValueError(f"token {record.token_id} has {len(record.top)} of {num_logprobs}")
        parts.append(_CHOSEN.pack(record.token_id, record.logprob))
        parts.extend(_CHOSEN.pack(*pair) for pair in record.top)
    return b"".join(parts)


def unpack_records(data: bytes, num_logprobs: int | None) -> Iterator[TokenRecord]:
    """The inverse of `pack_records`; a trailing partial record is dropped."""
    size = record_bytes(num_logprobs)
    for start in range(0, len(data) - size + 1, size):
        if num_logprobs is None:
            yield TokenRecord(_ID.unpack_from(data, start)[0])
            continue
        pairs = tuple(_CHOSEN.iter_unpack(data[start : start + size]))
        yield TokenRecord(pairs[0][0], pairs[0][1], pairs[1:])
