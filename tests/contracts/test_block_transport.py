"""One suite for every block transport: what comes is what was lent, and whatever fails is a miss."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest

from tiering.block_stamp import BlockStamp
from tiering.errors import (
    PeerCorrupt,
    PeerIncompatible,
    PeerUnavailable,
    TieringError,
    TransportMissing,
)
from tiering.stores.block_store import ByteArray, payload_checksum
from tiering.transports.block_transport import BlockTransport, Compatibility, Loan, OfferedBlock
from tiering.transports.nixl_agent import NixlAgent
from tiering.transports.nixl_transport import NixlPusher, NixlTransport
from tiering.transports.tcp_server import TcpBlockServer
from tiering.transports.tcp_transport import TcpTransport

BLOCK_BYTES = 70_000
WANTED = Compatibility(BLOCK_BYTES, "model.L2.T16")
LIMIT_S = 20.0
STALL_S = 3.0
SECRET = b"between nodes"


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def payload_of(number: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


@dataclass
class Shelf:
    """A library of a few blocks in memory; `spoil` may change what is lent behind its stamps."""

    numbers: Sequence[int] = range(8)
    served: Compatibility = WANTED
    spoil: Callable[[list[ByteArray]], None] = lambda _: None
    num_lent: int = 0
    num_back: int = 0
    lent: threading.Event = field(default_factory=threading.Event)

    def refusal(self, wanted: Compatibility) -> str:
        return "" if wanted == self.served else str(self.served)

    def find(self, keys: Sequence[bytes]) -> int:
        here = {key_of(number) for number in self.numbers}
        return next((i for i, key in enumerate(keys) if key not in here), len(keys))

    @contextmanager
    def lend(self, keys: Sequence[bytes], max_blocks: int, wait_s: float) -> Iterator[Loan]:
        numbers = [int.from_bytes(key, "big") for key in keys[: min(self.find(keys), max_blocks)]]
        payloads: list[ByteArray] = [payload_of(number) for number in numbers]
        sums = [payload_checksum(payload) for payload in payloads]
        stamps = [
            BlockStamp(key_of(n), 9, 16, BLOCK_BYTES, s, b"o" * 8)
            for n, s in zip(numbers, sums, strict=True)
        ]
        self.spoil(payloads)
        self.num_lent += 1
        try:
            yield Loan([OfferedBlock(stamp, 60.0) for stamp in stamps], payloads)
        finally:
            self.num_back += 1
            self.lent.set()


@dataclass
class Bench:
    """Room for a few blocks; what was not published must not be looked at."""

    num_slots: int = 64
    offered: Sequence[OfferedBlock] = ()
    slots: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    published: list[int] = field(default_factory=list)

    def take(self, offered: Sequence[OfferedBlock]) -> Sequence[ByteArray]:
        self.offered = offered
        self.slots = [np.zeros(BLOCK_BYTES, np.uint8) for _ in offered[: self.num_slots]]
        return self.slots

    def publish(self, index: int) -> None:
        assert index == len(self.published), "in order"
        assert (self.slots[index] == payload_of(index)).all()
        self.published.append(index)


class Rig(Protocol):
    """A transport, and how a node lends over it."""

    transport: BlockTransport

    def lending(self, shelf: Shelf, secret: bytes = SECRET) -> AbstractContextManager[str]:
        """The peer's address while it lends."""
        ...


class TcpRig:
    def __init__(self) -> None:
        self.transport: BlockTransport = TcpTransport(SECRET, STALL_S)

    @contextmanager
    def lending(self, shelf: Shelf, secret: bytes = SECRET) -> Iterator[str]:
        server = TcpBlockServer("127.0.0.1", 0, secret, shelf, STALL_S)
        port = server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop()


class NixlRig:
    """Over UCX and the loop-back device, in host memory; needs the extra `nixl`."""

    def __init__(self) -> None:
        os.environ |= {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp"}
        try:
            agent = NixlAgent()
        except TransportMissing as missing:
            pytest.skip(f"{missing}; it is in the extra nixl")
        self.transport: BlockTransport = NixlTransport(agent, SECRET, STALL_S)
        self._pusher = NixlPusher(NixlAgent())

    @contextmanager
    def lending(self, shelf: Shelf, secret: bytes = SECRET) -> Iterator[str]:
        server = TcpBlockServer("127.0.0.1", 0, secret, shelf, STALL_S, pusher=self._pusher)
        port = server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop()


@cache
def rig_of(kind: type[TcpRig | NixlRig]) -> TcpRig | NixlRig:
    return kind()


@pytest.fixture(params=[TcpRig, NixlRig], ids=["tcp", "nixl"])
def rig(request: pytest.FixtureRequest) -> Any:
    return rig_of(request.param)


def keys(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def deadline() -> float:
    return time.monotonic() + LIMIT_S


def test_a_head_run_comes_over_byte_for_byte_with_its_stamps(rig: Rig) -> None:
    shelf, room = Shelf(), Bench()
    with rig.lending(shelf) as peer:
        wanted = keys(0, 1, 2, 3, 99, 4)
        assert rig.transport.find(peer, WANTED, wanted, deadline()) == 4
        assert rig.transport.pull(peer, WANTED, wanted, room, deadline()) == 4 * BLOCK_BYTES
        assert shelf.lent.wait(LIMIT_S)
    assert room.published == [0, 1, 2, 3]
    assert [b.stamp.key for b in room.offered] == keys(0, 1, 2, 3)
    (first, *_) = room.offered
    assert (first.stamp.num_tokens, first.stamp.owner, first.lifetime_s) == (16, b"o" * 8, 60.0)
    assert (shelf.num_lent, shelf.num_back) == (1, 1)


def test_nothing_there_is_no_error(rig: Rig) -> None:
    room = Bench()
    with rig.lending(Shelf()) as peer:
        assert rig.transport.find(peer, WANTED, keys(50), deadline()) == 0
        assert rig.transport.pull(peer, WANTED, keys(50), room, deadline()) == 0
    assert room.published == []


def test_a_room_that_is_too_small_gets_the_head(rig: Rig) -> None:
    room = Bench(num_slots=3)
    with rig.lending(Shelf()) as peer:
        assert rig.transport.pull(peer, WANTED, keys(*range(8)), room, deadline()) > 0
    assert room.published == [0, 1, 2]


def test_other_blocks_are_refused_with_both_values_named(rig: Rig) -> None:
    served = Compatibility(BLOCK_BYTES, "model.L2.T32")
    with rig.lending(Shelf(served=served)) as peer:
        with pytest.raises(PeerIncompatible) as caught:
            rig.transport.find(peer, WANTED, keys(0), deadline())
        with pytest.raises(PeerIncompatible):
            rig.transport.pull(peer, WANTED, keys(0), Bench(), deadline())
    assert WANTED.digest in str(caught.value)
    assert served.digest in str(caught.value)
    assert "T16" in str(caught.value)
    assert "T32" in str(caught.value)


def test_a_peer_with_another_secret_gets_and_gives_nothing(rig: Rig) -> None:
    shelf = Shelf()
    with rig.lending(shelf, b"another") as peer, pytest.raises(PeerIncompatible) as caught:
        rig.transport.pull(peer, WANTED, keys(0), Bench(), deadline())
    assert shelf.num_lent == 0
    assert SECRET.decode() not in str(caught.value)


def flip(payloads: list[ByteArray]) -> None:
    payloads[2] = payloads[2].copy()
    payloads[2][BLOCK_BYTES // 2] ^= 1


def swap(payloads: list[ByteArray]) -> None:
    payloads[2], payloads[3] = payloads[3], payloads[2]


def shorten(payloads: list[ByteArray]) -> None:
    payloads[2] = payloads[2][:-100]


@pytest.mark.parametrize("spoil", [flip, swap, shorten])
def test_a_block_with_other_bytes_ends_the_run_before_it(
    rig: Rig, spoil: Callable[[list[ByteArray]], None]
) -> None:
    room = Bench()
    with rig.lending(Shelf(spoil=spoil)) as peer, pytest.raises(PeerCorrupt) as caught:
        rig.transport.pull(peer, WANTED, keys(*range(8)), room, deadline())
    assert caught.value.index == 2
    assert room.published == [0, 1]


def cut(payloads: list[ByteArray]) -> None:
    del payloads[3:]


def test_a_peer_that_stops_in_the_middle_leaves_what_was_whole(rig: Rig) -> None:
    room = Bench()
    with rig.lending(Shelf(spoil=cut)) as peer, pytest.raises(TieringError):
        rig.transport.pull(peer, WANTED, keys(*range(8)), room, deadline())
    assert room.published == [0, 1, 2]


def test_nobody_there_is_said_at_once(rig: Rig) -> None:
    with rig.lending(Shelf()) as peer:
        pass
    began_s = time.monotonic()
    with pytest.raises(PeerUnavailable):
        rig.transport.pull(peer, WANTED, keys(0), Bench(), deadline())
    assert time.monotonic() - began_s < LIMIT_S / 2


def test_a_deadline_that_has_passed_moves_nothing(rig: Rig) -> None:
    shelf = Shelf()
    with rig.lending(shelf) as peer, pytest.raises(PeerUnavailable):
        rig.transport.pull(peer, WANTED, keys(0), Bench(), time.monotonic() - 1)
    assert shelf.num_lent == 0


def test_many_pulls_at_once_are_served_or_refused_and_all_loans_come_back(rig: Rig) -> None:
    shelf = Shelf()
    rooms = [Bench() for _ in range(40)]
    refused: list[TieringError] = []

    def pull(room: Bench) -> None:
        try:
            rig.transport.pull(peer, WANTED, keys(*range(8)), room, deadline())
        except PeerUnavailable as error:
            refused.append(error)

    with rig.lending(shelf) as peer:
        threads = [threading.Thread(target=pull, args=(room,)) for room in rooms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        limit_s = time.monotonic() + LIMIT_S
        while shelf.num_back < shelf.num_lent and time.monotonic() < limit_s:
            time.sleep(0.01)
    whole = [room for room in rooms if len(room.published) == 8]
    assert whole
    assert len(whole) + len(refused) == 40
    assert shelf.num_lent == shelf.num_back
