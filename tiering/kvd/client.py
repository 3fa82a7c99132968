"""A holder's side of kvd: index operations over the socket, bytes through the shared slab."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiering import frames
from tiering.block_stamp import BlockStamp
from tiering.errors import KvdUnavailable, ProtocolViolation, SlotCorrupt
from tiering.kvd.connection import KvdConnection
from tiering.kvd.protocol import Op
from tiering.kvd.stats import KvdStats
from tiering.lease import (
    BlockLease,
    LeasedBlock,
    PeerOffer,
    PullResult,
    Reservation,
    SharedSlab,
)
from tiering.stores.dram_slab import DramSlab, map_slab_memory
from tiering.tier import Tier

_WAIT_SHARE = 0.8  # of the time limit that kvd may spend on promotion before it must answer


class KvdClient:
    """One holder's connection to its node's kvd. Synchronous, one instance per thread.

    Every call raises `KvdUnavailable` when the daemon is away, late or broke off; the connection is
    closed then, and `connect` may be called again at any time. Leases and reservations of an
    earlier connection are dead: `load` says False, the others pass over them.

    Keys are 16 bytes; of more than 65,536 keys the rest is treated as absent or without room.
    """

    def __init__(
        self,
        socket_path: Path,
        block_bytes: int,
        holder: str,
        *,
        timeout_s: float = 5.0,
        namespace: str = "",
    ) -> None:
        """`namespace` (at most 200 characters) names what the blocks are made by: model and layout.

        Blocks come only from peers whose holders named the same one.
        """
        self._path = str(socket_path)
        self._block_bytes = block_bytes
        self._holder = holder
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._connection = KvdConnection(socket_path, timeout_s)
        self._slab: DramSlab | None = None
        self._shared_slab: SharedSlab | None = None
        self._session = b""
        self._loaded_bytes, self._load_s, self._store_s = 0, 0.0, 0.0  # not yet reported

    @property
    def has_hung_up(self) -> bool:
        """The daemon ended this connection; `connect` again."""
        return self._connection.has_hung_up

    @property
    def is_connected(self) -> bool:
        """`connect` succeeded and nothing failed since."""
        return self._connection.is_open

    @property
    def shared_slab(self) -> SharedSlab | None:
        """The slab that leases speak of, to be mapped elsewhere too; None without a connection."""
        return self._shared_slab

    def connect(self) -> None:
        """Shake hands and map the slab; a living connection is closed first.

        Raises:
            KvdUnavailable: nobody answers, or not in time.
            LayoutMismatch: kvd serves smaller blocks; both sizes are named.
            LayoutNotPacked: kvd packs the blocks of another layout; both are named.
        """
        self.close()
        welcome = self._connection.open(self._holder, self._block_bytes, self._namespace)
        if welcome.slab_fd < 0:
            raise self._broken_off(ProtocolViolation("no slab came with the greeting"))
        self._shared_slab = SharedSlab(welcome.slab_fd, welcome.slab_bytes, welcome.slot_bytes)
        try:
            memory = map_slab_memory(welcome.slab_fd, welcome.slab_bytes, is_owner=False)
        except (OSError, ValueError) as error:
            raise self._broken_off(error) from error
        self._slab = DramSlab(memory, welcome.slot_bytes)  # cut for the largest blocks of the node
        self._session = welcome.session

    def close(self) -> None:
        """End the connection, and with it all leases and reservations. Idempotent."""
        self._connection.close()
        if self._slab is not None:
            self._slab.close()
            self._slab = None
        if self._shared_slab is not None:
            os.close(self._shared_slab.descriptor)
            self._shared_slab = None
        self._session = b""

    def find(self, keys: Sequence[bytes]) -> int:
        """Length of the head run of `keys` that is READY in DRAM or NVMe. Changes nothing."""
        if not keys:
            return 0
        return frames.as_int(self._ask(Op.FIND, list(keys[: frames.MAX_KEYS])))

    def locate(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """Lengths of the head run of `keys` in DRAM, and in DRAM or NVMe. Changes nothing."""
        if not keys:
            return 0, 0
        value = self._ask(Op.LOCATE, list(keys[: frames.MAX_KEYS]))
        try:
            ((num_dram, num_all),) = frames.as_rows([value], 2)
        except ProtocolViolation as error:
            raise self._broken_off(error) from error
        return num_dram, num_all

    def acquire(
        self, keys: Sequence[bytes], *, ttl_s: float = 30.0, wait_s: float | None = None
    ) -> BlockLease:
        """Lease the head run of `keys`; blocks found on NVMe are promoted to DRAM first.

        wait_s: for how long to wait for NVMe (else most of the time limit); with 0 what is in DRAM
        is leased at once, and the rest begins to come up.
        The run ends at the first block that is absent, still being written, corrupt or late.
        """
        asked = list(keys[: frames.MAX_KEYS])
        deadline_s = time.monotonic() + ttl_s  # before asking, so that kvd's deadline is later
        if not asked:
            return BlockLease(0, [], self._session, deadline_s)
        more_s = wait_s or 0.0
        if wait_s is None:
            wait_s = self._timeout_s * _WAIT_SHARE
        value = self._ask(Op.ACQUIRE, asked, ttl_s, wait_s, more_s=more_s)
        try:
            lease_id, blocks = _parsed_lease(value, asked)
        except ProtocolViolation as error:
            raise self._broken_off(error) from error
        return BlockLease(lease_id, blocks, self._session, deadline_s)

    def load(self, lease: BlockLease, index: int, into: npt.NDArray[np.uint8]) -> bool:
        """Copy block `index` of a lease into a contiguous uint8 array and verify the copy.

        False: wrong bytes, or the lease ran out before the copy was complete; `into` is undefined
        then, and the run is to be cut here. kvd hears of wrong bytes and drops the block.

        Raises:
            ValueError: `into` is shorter than the block.
        """
        block = lease.blocks[index]
        began_s = time.monotonic()
        if self._slab is None or lease.session != self._session or began_s >= lease.deadline_s:
            return False
        try:
            self._slab.copy_out(block.slot, block.num_bytes, block.checksum, into)
        except SlotCorrupt:
            with suppress(KvdUnavailable):
                self._ask(Op.SUSPECT, block.key, block.generation)
            return False
        ended_s = time.monotonic()
        self._load_s += ended_s - began_s
        self._loaded_bytes += block.num_bytes
        return ended_s < lease.deadline_s

    def verify(self, lease: BlockLease, index: int) -> bool:
        """Block `index` of a lease lies in its slot as it was stored; kvd drops one that does not."""
        block = lease.blocks[index]
        if self._slab is None or not self.keeps(lease):
            return False
        if self._slab.verify(block.slot, block.stamp):
            return True
        self._ask(Op.SUSPECT, block.key, block.generation)
        return False

    def keeps(self, lease: BlockLease) -> bool:
        """The blocks of a lease were in their slots up to now. Any thread.

        So whoever reads slots in place asks this afterwards.
        """
        is_in_time = time.monotonic() < lease.deadline_s
        return is_in_time and self._session == lease.session and self._connection.is_alive

    def release(self, lease: BlockLease) -> None:
        """End a lease. Idempotent."""
        if lease.lease_id and lease.session == self._session and self.is_connected:
            self._ask(Op.RELEASE, lease.lease_id, self._loaded_bytes, self._load_s)
            self._loaded_bytes, self._load_s = 0, 0.0
        lease.session = b""

    def reserve(
        self,
        keys: Sequence[bytes],
        *,
        ttl_s: float = 10.0,
        lifetime_s: float | None = None,
        owner: bytes = b"",
    ) -> list[Reservation | None]:
        """Take slots to write blocks into, one entry per key.

        None: the block is present or being written, or there is no room; drop the write. With
        `lifetime_s` the blocks vanish that long after their commit and are never written to NVMe.
        `owner` (8 bytes, `owner_tag`): the tenant whose share of the tiers the blocks count for.
        """
        asked = list(keys[: frames.MAX_KEYS])
        deadline_s = time.monotonic() + ttl_s
        if not asked:
            return []
        rows = self._ask(Op.RESERVE, asked, ttl_s, lifetime_s, *([owner] if owner else []))
        try:
            reserved = self._parsed_reservations(rows, asked, deadline_s)
        except ProtocolViolation as error:
            raise self._broken_off(error) from error
        return reserved + [None] * (len(keys) - len(asked))

    def write(self, reservation: Reservation, data: npt.NDArray[np.uint8], num_tokens: int) -> None:
        """Copy one block (contiguous uint8, at most `block_bytes`) into the reserved slot.

        Nothing is written for a reservation that ran out or belongs to an earlier connection;
        `commit` counts it as refused.

        Raises:
            ValueError: the data is longer than a block.
        """
        if not 0 < data.nbytes <= self._block_bytes:
            raise ValueError(f"{data.nbytes} bytes in a block of {self._block_bytes}")
        if self._slab is None:
            raise KvdUnavailable(self._path, "not connected")
        if not self._is_alive(reservation.session, reservation.deadline_s):
            return
        began_s = time.perf_counter()
        checksum = self._slab.fill(reservation.slot, data)
        key, generation = reservation.key, reservation.generation
        reservation.stamp = BlockStamp(key, generation, num_tokens, data.nbytes, checksum)
        self._store_s += time.perf_counter() - began_s

    def commit(self, reservations: Sequence[Reservation]) -> int:
        """Publish written blocks; before this nothing of them is visible to anyone.

        Returns the number published: reservations that ran out, were never written, or belong to
        an earlier connection are refused.
        """
        rows = [
            [r.slot, r.generation, r.stamp.num_tokens, r.stamp.num_bytes, r.stamp.checksum]
            for r in reservations
            if r.stamp is not None and r.session == self._session
        ]
        if not rows:
            return 0
        store_s, self._store_s = self._store_s, 0.0
        return frames.as_int(self._ask(Op.COMMIT, rows, store_s))

    def abort(self, reservations: Sequence[Reservation]) -> None:
        """Give reserved slots back unwritten. Idempotent."""
        rows = [[r.slot, r.generation] for r in reservations if r.session == self._session]
        if rows and self.is_connected:
            self._ask(Op.ABORT, rows)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Drop blocks from all tiers, except those under a lease."""
        if keys:
            self._ask(Op.DISCARD, list(keys[: frames.MAX_KEYS]))

    def purge(self, owner: bytes) -> int:
        """Drop an owner's blocks from all tiers, except those under a lease; returns how many."""
        return frames.as_int(self._ask(Op.PURGE, owner))

    def survey(
        self, keys: Sequence[bytes], peers: Sequence[str], *, wait_s: float = 0.2
    ) -> list[PeerOffer]:
        """How much of the head run each peer (`host:port`, at most 8) has; moves nothing."""
        asked = list(keys[: frames.MAX_KEYS])
        if not asked or not peers:
            return []
        rows = self._ask(Op.SURVEY, asked, list(peers), wait_s, more_s=wait_s)
        try:
            return [_offer(peer, row) for peer, row in zip(peers, _as_list(rows), strict=True)]
        except (ProtocolViolation, ValueError) as error:
            raise self._broken_off(error) from error

    def pull(self, keys: Sequence[bytes], peers: Sequence[str], *, wait_s: float) -> PullResult:
        """Bring what this node lacks of the head run here from a peer; then `acquire` finds it.

        `peers`: `host:port` of at most 8 nodes likely to have it, the best first. Returns within
        `wait_s` with whatever came; never an error of a peer: what did not come is to be computed.
        """
        asked = list(keys[: frames.MAX_KEYS])
        if not asked or not peers:
            return PullResult(self.find(asked))
        value = self._ask(Op.PULL, asked, list(peers), wait_s, more_s=wait_s)
        try:
            return _pull_result(value)
        except ProtocolViolation as error:
            raise self._broken_off(error) from error

    def stats(self) -> KvdStats:
        """What the daemon counts."""
        value = self._ask(Op.STATS)
        try:
            return KvdStats.from_map(value)
        except ProtocolViolation as error:
            raise self._broken_off(error) from error

    def _is_alive(self, session: bytes, deadline_s: float) -> bool:
        return session == self._session and time.monotonic() < deadline_s

    def _ask(self, op: Op, *arguments: object, more_s: float = 0.0) -> object:
        try:
            return self._connection.ask(op, *arguments, more_s=more_s)
        except KvdUnavailable:
            self.close()
            raise

    def _broken_off(self, error: Exception) -> KvdUnavailable:
        self.close()
        return self._connection.broken_off(error)

    def _parsed_reservations(
        self, rows: object, keys: list[bytes], deadline_s: float
    ) -> list[Reservation | None]:
        if not isinstance(rows, list) or len(rows) != len(keys):
            raise ProtocolViolation("no reservations")
        return [
            None if row is None else _reserved(key, row, self._session, deadline_s)
            for key, row in zip(keys, rows, strict=True)
        ]


def _parsed_lease(value: object, keys: list[bytes]) -> tuple[int, list[LeasedBlock]]:
    match value:
        case [int() as lease_id, list() as rows] if len(rows) <= len(keys):
            numbers = frames.as_rows(rows, 6)
            return lease_id, [_leased(k, row) for k, row in zip(keys, numbers, strict=False)]
        case _:
            raise ProtocolViolation("no lease")


def _leased(key: bytes, row: list[int]) -> LeasedBlock:
    slot, generation, checksum, is_nvme, num_tokens, num_bytes = row
    tier = Tier.NVME if is_nvme else Tier.DRAM
    return LeasedBlock(key, slot, generation, checksum, tier, num_tokens, num_bytes)


def _reserved(key: bytes, row: object, session: bytes, deadline_s: float) -> Reservation:
    ((slot, generation),) = frames.as_rows([row], 2)
    return Reservation(key, slot, generation, session, deadline_s)


def _as_list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ProtocolViolation("no list")
    return value


def _offer(peer: str, row: object) -> PeerOffer:
    match row:
        case [int() as num_blocks, int() | float() as seconds]:
            return PeerOffer(peer, num_blocks, seconds)
        case _:
            raise ProtocolViolation("no answer about a peer")


def _pull_result(value: object) -> PullResult:
    match value:
        case [*numbers, int() | float() as seconds, str() as peer]:
            ((num_found, num_blocks, num_bytes),) = frames.as_rows([numbers], 3)
            return PullResult(num_found, num_blocks, num_bytes, seconds, peer)
        case _:
            raise ProtocolViolation("no result of a pull")
