"""How fast a link between two nodes is, measured the way a pull uses it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

import numpy as np
import psutil

from tiering import frames
from tiering.errors import ProtocolViolation
from tiering.transports.handshake import NO_BLOCKS
from tiering.transports.peer_socket import PeerSocket
from tiering.transports.tcp_transport import TcpTransport
from tiering.transports.tcp_wire import MAX_STREAM_BYTES, PeerOp

BLOCK_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
LONGEST_PROBE_S = 20.0
_NUM_ECHOES = 20
_ECHO_BYTES = 64
_MARGIN_S = 5.0  # for connecting, and the answer's way back
_LOOPBACK = "loopback"
_LOOPBACK_BYTES_PER_S = 1e9
_BYTES_PER_MBIT = 1e6 / 8
_FLOOR = 0.5  # of the nominal rate


@dataclass(frozen=True, slots=True)
class LinkSample:
    """Blocks of one size over a link: the rate of `num_bytes` of them."""

    block_bytes: int
    num_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class LinkProbe:
    """One direction, from the node that sends to the one that asked.

    `kind` names the link as the asker's machine knows it; `nominal_bytes_per_s` is what that kind
    should do, 0 when the machine cannot say.
    """

    round_trip_s: float
    kind: str
    nominal_bytes_per_s: float
    samples: tuple[LinkSample, ...]

    @property
    def bytes_per_s(self) -> float:
        """The best rate of all block sizes."""
        return max((sample.bytes_per_s for sample in self.samples), default=0.0)

    @property
    def is_slow(self) -> bool:
        """Well below what a link of this kind does."""
        return self.bytes_per_s < _FLOOR * self.nominal_bytes_per_s


def probe_link(
    transport: TcpTransport, peer: str, block_sizes: Sequence[int], budget_s: float
) -> LinkProbe:
    """Measure the way from a peer to here, in about `budget_s` (20 s at most).

    Raises:
        PeerUnavailable, PeerIncompatible: as `BlockTransport`.
    """
    budget_s = min(budget_s, LONGEST_PROBE_S)
    deadline_s = time.monotonic() + budget_s + _MARGIN_S
    with transport.greeted(peer, NO_BLOCKS, deadline_s) as connection:
        kind, nominal = _kind_of(*connection.addresses)
        round_trip_s = _round_trip_s(connection)
        share_s = budget_s / max(len(block_sizes), 1)
        samples = tuple(_sample(connection, size, share_s) for size in block_sizes)
    return LinkProbe(round_trip_s, kind, nominal, samples)


def ask_for_probe(
    transport: TcpTransport, node: str, peer: str, block_sizes: Sequence[int], budget_s: float
) -> LinkProbe:
    """Have the node at one address measure the way from another peer to itself.

    Raises:
        PeerUnavailable, PeerIncompatible: as `BlockTransport`; also when the node cannot reach it.
    """
    deadline_s = time.monotonic() + budget_s + 2 * _MARGIN_S
    with transport.greeted(node, NO_BLOCKS, deadline_s) as connection:
        connection.send(PeerOp.MEASURE, peer, list(block_sizes), budget_s)
        connection.allow_silence(budget_s + _MARGIN_S)
        return unpack_probe(connection.receive())


def pack_probe(probe: LinkProbe) -> list[object]:
    """The answer to MEASURE."""
    rows = [[s.block_bytes, s.num_bytes, s.bytes_per_s] for s in probe.samples]
    return [probe.round_trip_s, probe.kind, probe.nominal_bytes_per_s, rows]


def unpack_probe(answer: object) -> LinkProbe:
    """Back from the wire. Raises `ProtocolViolation`."""
    match answer:
        case [float() as round_trip_s, str() as kind, float() as nominal, list() as rows]:
            samples = tuple(_unpacked_sample(row) for row in rows)
            return LinkProbe(round_trip_s, kind, nominal, samples)
        case [str() as reason]:
            raise ProtocolViolation(reason)
        case _:
            raise ProtocolViolation("no measurement")


def _unpacked_sample(row: object) -> LinkSample:
    match row:
        case [int() as block_bytes, int() as num_bytes, float() as bytes_per_s]:
            return LinkSample(block_bytes, num_bytes, bytes_per_s)
        case _:
            raise ProtocolViolation("no sample")


def _round_trip_s(connection: PeerSocket) -> float:
    taken_s = []
    for _ in range(_NUM_ECHOES):
        began_s = time.perf_counter()
        connection.send(PeerOp.ECHO, bytes(_ECHO_BYTES))
        connection.receive()
        taken_s.append(time.perf_counter() - began_s)
    return statistics.median(taken_s)


def _sample(connection: PeerSocket, block_bytes: int, budget_s: float) -> LinkSample:
    """Twice as many blocks each time, until the time is used: the longest run counts."""
    room = np.empty(block_bytes, dtype=np.uint8)
    until_s = time.perf_counter() + budget_s
    num_blocks = 1
    while True:
        began_s = time.perf_counter()
        connection.send(PeerOp.STREAM, block_bytes, num_blocks)
        frames.as_arguments(connection.receive(), 1)
        for _ in range(num_blocks):
            connection.receive_block(room)
        now_s = time.perf_counter()
        took_s = now_s - began_s
        num_bytes = num_blocks * block_bytes
        if now_s + 2 * took_s > until_s or 2 * num_bytes > MAX_STREAM_BYTES:
            return LinkSample(block_bytes, num_bytes, num_bytes / took_s)
        num_blocks *= 2


def _kind_of(here: str, there: str) -> tuple[str, float]:
    """Name and nominal rate of the link that a connection between two addresses takes."""
    if here == there or ip_address(here).is_loopback:
        return _LOOPBACK, _LOOPBACK_BYTES_PER_S
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == here for entry in addresses):
            stats = psutil.net_if_stats().get(name)
            speed_mbit = stats.speed if stats is not None else 0
            shown = f"{speed_mbit} Mbit/s" if speed_mbit > 0 else "unknown speed"
            return f"{name}, {shown}", max(speed_mbit, 0) * _BYTES_PER_MBIT
    return "unknown", 0.0
