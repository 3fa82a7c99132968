"""An operator's side of kvd: questions and purges, without a share in the slab."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tiering import frames
from tiering.errors import ProtocolViolation
from tiering.kvd.connection import KvdConnection
from tiering.kvd.protocol import Op
from tiering.kvd.stats import KvdStats
from tiering.tier import Tier


@dataclass(frozen=True, slots=True)
class ListedBlock:
    """One block of a tier; `num_uses` counts from when it came there."""

    key: bytes
    owner: bytes
    num_tokens: int
    num_bytes: int
    num_leases: int
    num_uses: int


class KvdOperator:
    """Asks a running kvd, whatever its layout; works before the first worker came, too.

    Every call raises `KvdUnavailable` as `KvdClient`'s do. A context manager.
    """

    def __init__(self, socket_path: Path, name: str, *, timeout_s: float = 5.0) -> None:
        self._connection = KvdConnection(socket_path, timeout_s)
        self._name = name

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self) -> None:
        """Greet; a living connection is closed first."""
        self._connection.open(self._name, 0)

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._connection.close()

    def stats(self) -> KvdStats:
        """What the daemon counts."""
        value = self._connection.ask(Op.STATS)
        try:
            return KvdStats.from_map(value)
        except ProtocolViolation as error:
            raise self._connection.broken_off(error) from error

    def listed(self, tier: Tier, owner: bytes = b"") -> Iterator[ListedBlock]:
        """The readable blocks of DRAM or NVMe, of one owner if given, oldest first.

        It is asked piece by piece: what comes and goes meanwhile may be missed or seen twice.
        """
        start = 0
        while True:
            value = self._connection.ask(Op.LIST, int(tier is Tier.NVME), start, owner)
            try:
                start, blocks = _parsed_list(value)
            except ProtocolViolation as error:
                raise self._connection.broken_off(error) from error
            yield from blocks
            if not start:
                return

    def purge(self, owner: bytes) -> int:
        """Drop an owner's blocks from all tiers, except those under a lease; returns how many."""
        return frames.as_int(self._connection.ask(Op.PURGE, owner))


def _parsed_list(value: object) -> tuple[int, list[ListedBlock]]:
    match value:
        case [int() as next_start, list() as rows]:
            return next_start, [_parsed_block(row) for row in rows]
        case _:
            raise ProtocolViolation("no list of blocks")


def _parsed_block(row: object) -> ListedBlock:
    match row:
        case [bytes() as key, bytes() as owner, *numbers]:
            ((num_tokens, num_bytes, num_leases, num_uses),) = frames.as_rows([numbers], 4)
            return ListedBlock(key, owner, num_tokens, num_bytes, num_leases, num_uses)
        case _:
            raise ProtocolViolation("no block")
