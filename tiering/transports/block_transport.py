"""The transport port: blocks from the node that has them to the node that wants them.

A pull is asked for by the receiver and pushed by the sender. What both sides of a transport need of
their node is `Room` and `Library`; their methods are called on the transport's threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from tiering.block_stamp import BlockStamp
from tiering.stores.block_store import ByteArray

KEY_SCHEME = "sha256-chain.v1"
WIRE_VERSION = 2
_DIGEST_CHARS = 16


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What two nodes must agree on before a byte is moved.

    `namespace` names model and layout as the workers do; the tenant's salt is in the keys.
    """

    block_bytes: int
    namespace: str

    @property
    def digest(self) -> str:
        """One value for all of it, with the versions of wire and keys."""
        said = f"{WIRE_VERSION}\0{KEY_SCHEME}\0{self.block_bytes}\0{self.namespace}"
        return hashlib.sha256(said.encode()).hexdigest()[:_DIGEST_CHARS]

    def __str__(self) -> str:
        return (
            f"{self.digest} ({self.block_bytes} bytes a block, {self.namespace or 'no namespace'})"
        )


@dataclass(frozen=True, slots=True)
class OfferedBlock:
    """A block that a peer is about to push; `lifetime_s` as in `Block`, what is left of it."""

    stamp: BlockStamp
    lifetime_s: float | None = None


@dataclass(frozen=True, slots=True)
class Loan:
    """Blocks that stay as they are until the loan is given back, and where their bytes lie."""

    offered: Sequence[OfferedBlock]
    payloads: Sequence[ByteArray]


class Room(Protocol):
    """Where a pull's blocks go."""

    def take(self, offered: Sequence[OfferedBlock]) -> Sequence[ByteArray]:
        """Memory for the first of these blocks, as far as there is room."""
        ...

    def publish(self, index: int) -> None:
        """The block is complete and verified. Called in order; what is not published is void."""
        ...


class Library(Protocol):
    """What a node lends to its peers."""

    def refusal(self, wanted: Compatibility) -> str:
        """What this node serves, if that is something else; empty when it is compatible."""
        ...

    def find(self, keys: Sequence[bytes]) -> int:
        """Length of the head run that it has."""
        ...

    def lend(
        self, keys: Sequence[bytes], max_blocks: int, wait_s: float
    ) -> AbstractContextManager[Loan]:
        """The head run, at most so many blocks, for as long as the context lasts."""
        ...


class BlockTransport(Protocol):
    """Asks peers, by their addresses. Blocking; any thread; ends by `deadline_s` (monotonic).

    All methods raise:
        PeerUnavailable: it is away, late, broke off, or said what no peer says.
        PeerIncompatible: it serves other blocks; both are named.
    """

    def find(
        self, peer: str, wanted: Compatibility, keys: Sequence[bytes], deadline_s: float
    ) -> int:
        """Length of the head run of `keys` that the peer has."""
        ...

    def pull(
        self,
        peer: str,
        wanted: Compatibility,
        keys: Sequence[bytes],
        room: Room,
        deadline_s: float,
    ) -> int:
        """Bring the head run of `keys` here, verified block by block; how many bytes came.

        What was published before an error stays.

        Raises:
            PeerCorrupt: a block's bytes are not those of its stamp; it and those behind are void.
        """
        ...
