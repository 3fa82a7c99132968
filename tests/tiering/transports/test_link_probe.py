"""Measuring a link: both ends on this machine, one asked to measure the way from the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.contracts.test_block_transport import Shelf
from tiering.errors import PeerIncompatible, PeerUnavailable
from tiering.transports.link_probe import LinkProbe, LinkSample, ask_for_probe
from tiering.transports.tcp_server import TcpBlockServer
from tiering.transports.tcp_transport import TcpTransport

SECRET = b"between nodes"
STALL_S = 10.0  # a thread may get no core for seconds on a busy machine
SIZES = (4096, 65_536)


@contextmanager
def node(secret: bytes = SECRET) -> Iterator[str]:
    server = TcpBlockServer("127.0.0.1", 0, secret, Shelf(), STALL_S)
    port = server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop()


def test_a_node_measures_the_way_from_another_to_itself() -> None:
    with node() as near, node() as far:
        probe = ask_for_probe(TcpTransport(SECRET, STALL_S), near, far, SIZES, 0.3)
    assert probe.kind == "loopback"
    assert 0 < probe.round_trip_s < 1
    assert [sample.block_bytes for sample in probe.samples] == list(SIZES)
    assert all(sample.bytes_per_s > 0 for sample in probe.samples)
    assert probe.bytes_per_s == max(sample.bytes_per_s for sample in probe.samples)


def test_a_node_that_cannot_reach_the_other_says_so() -> None:
    with node() as far:
        pass
    with node() as near, pytest.raises(PeerUnavailable, match=far):
        ask_for_probe(TcpTransport(SECRET, STALL_S), near, far, SIZES, 0.3)


def test_nobody_measures_without_the_secret() -> None:
    with node() as near, pytest.raises(PeerIncompatible):
        ask_for_probe(TcpTransport(b"guessed"), near, near, SIZES, 0.3)


def test_a_link_is_slow_by_what_its_kind_should_do() -> None:
    gigabit = LinkProbe(0.001, "eth0, 1000 Mbit/s", 125e6, (LinkSample(4096, 4096, 6e6),))
    assert gigabit.is_slow
    assert not replace(gigabit, samples=(LinkSample(4096, 4096, 110e6),)).is_slow
    assert not replace(gigabit, nominal_bytes_per_s=0.0).is_slow
