"""Block keys: a cryptographic chain over the tokens, rooted in everything that changes KV bytes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

from tiering.block_stamp import KEY_BYTES, OWNER_BYTES

_ROOT_TAG = b"pointsman.kv.root.v1"
_TAIL_TAG = b"pointsman.kv.tail.v1"
_PRIVATE_TAG = b"pointsman.kv.private.v1"
_OWNER_TAG = b"pointsman.kv.owner.v1"
_ROOT_BYTES = 32


def _prefixed(part: bytes) -> bytes:
    return struct.pack("<I", len(part)) + part


def _tagged(value: str | int | bytes) -> bytes:
    match value:
        case bool():
            raise TypeError("a namespace field is str, int or bytes; write a bool as 0 or 1")
        case str():
            return b"s" + _prefixed(value.encode())
        case int():
            return b"i" + _prefixed(str(value).encode())
        case bytes():
            return b"b" + _prefixed(value)


def namespace_root(fields: Mapping[str, str | int | bytes]) -> bytes:
    """Digest of the namespace that block keys live in, 32 bytes.

    Every field is tagged with its name and type and length-prefixed, so that no two different
    mappings share a root (an adapter "X" and a salt "X" collided in other projects).
    """
    digest = hashlib.sha256(_ROOT_TAG)
    for name in sorted(fields):
        digest.update(_prefixed(name.encode()) + _tagged(fields[name]))
    return digest.digest()


class KeyChain:
    """Keys of successive full blocks of one token sequence.

    h_0 = root, h_i = sha256(h_{i-1} || tokens as u32 little endian); the key is the first 16 bytes
    of h_i, the full 32 bytes are carried in `state`. A chain made from an earlier `state` goes on
    where that one stopped.

    Raises:
        ValueError: the root is not 32 bytes long, a block is empty, a token is no u32.
    """

    def __init__(self, root: bytes) -> None:
        if len(root) != _ROOT_BYTES:
            raise ValueError(f"a chain starts from {_ROOT_BYTES} bytes, not {len(root)}")
        self._state = root

    @property
    def state(self) -> bytes:
        """The 32 bytes that the next block's key depends on."""
        return self._state

    def extend(self, tokens: Sequence[int]) -> bytes:
        """Key of the next full block, 16 bytes."""
        if not tokens:
            raise ValueError("a block holds at least one token")
        try:
            packed = struct.pack(f"<{len(tokens)}I", *tokens)
        except struct.error as error:
            raise ValueError("a token id is an unsigned 32-bit number") from error
        self._state = hashlib.sha256(self._state + packed).digest()
        return self._state[:KEY_BYTES]


class BlockHasher:
    """Keys of all full blocks of a token sequence at once."""

    def __init__(self, root: bytes) -> None:
        self._root = root

    def keys(self, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
        """One 16-byte key per full block; tokens behind the last full block are left out."""
        chain = KeyChain(self._root)
        ends = range(block_tokens, len(tokens) + 1, block_tokens)
        return [chain.extend(tokens[end - block_tokens : end]) for end in ends]


def owner_tag(tenant_salt: bytes) -> bytes:
    """The tag under which kvd counts a tenant's blocks, 8 bytes; empty for an empty salt."""
    if not tenant_salt:
        return b""
    return hashlib.sha256(_OWNER_TAG + _prefixed(tenant_salt)).digest()[:OWNER_BYTES]


def private_root(root: bytes, request_id: str) -> bytes:
    """The root of keys that no other request can have, 32 bytes."""
    name = _prefixed(request_id.encode())
    return hashlib.sha256(_PRIVATE_TAG + _prefixed(root) + name).digest()


def tail_key(root: bytes, request_id: str, attempt: int, num_tokens: int) -> bytes:
    """Key of the partial last block that one attempt hands over, 16 bytes; never shared."""
    name = _prefixed(request_id.encode())
    numbers = struct.pack("<QQ", attempt, num_tokens)
    return hashlib.sha256(_TAIL_TAG + _prefixed(root) + name + numbers).digest()[:KEY_BYTES]
