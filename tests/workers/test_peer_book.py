"""Which other nodes are asked for a sequence's blocks, from real heartbeats in a real store."""

from __future__ import annotations

import time

import pytest

from pipeline.ledger.node_board import NodeBoard
from pipeline.ledger.overview import LedgerOverview
from pipeline.ledger.store import connect
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.scheduling.fleet import Role, WorkerState, node_of
from pipeline.scheduling.link_report import LinkReport
from workers.peer_book import LINK_KEPT_S, PeerBook
from workers.sequence import Peer


def beat(ledger: WorkerLedger, node: str, address: str, *, namespace: str = "ns") -> None:
    worker = f"both-0@{node}#1"
    state = WorkerState(
        worker=worker,
        node=node,
        role=Role.BOTH,
        model="m",
        namespace=namespace,
        queues=("prefill.m",),
        capacity=4,
        peer_address=address,
    )
    ledger.beat(worker, 5.0, state.model_dump_json())


@pytest.fixture
def ledger(redis_url: str) -> WorkerLedger:
    return WorkerLedger(connect(redis_url), max_attempts=2, retention_s=60)


def book(redis_url: str) -> PeerBook:
    client = connect(redis_url)
    return PeerBook("here", "ns", LedgerOverview(client), NodeBoard(client))


def addresses(known: PeerBook, came_from: str) -> tuple[str, ...]:
    return tuple(peer.address for peer in known.peers_for(came_from))


def test_the_node_that_had_the_request_comes_first_and_others_behind_it(
    redis_url: str, ledger: WorkerLedger
) -> None:
    for node, address in (("here", "h:1"), ("a", "a:1"), ("b", "b:1"), ("silent", "")):
        beat(ledger, node, address)
    beat(ledger, "other-model", "o:1", namespace="other")
    known = book(redis_url)
    assert addresses(known, "both-0@b#1") == ("b:1", "a:1")
    assert addresses(known, "") == ("a:1", "b:1")
    assert addresses(known, "both-0@gone#9") == ("a:1", "b:1")


def link(source: str, target: str, *, age_s: float = 60.0) -> LinkReport:
    return LinkReport(
        source=source,
        target=target,
        round_trip_s=0.001,
        bytes_per_s=1e8,
        kind="wire",
        nominal_bytes_per_s=1.25e8,
        is_slow=False,
        by_block_bytes={1 << 20: 1e8},
        at_s=time.time() - age_s,
    )


def test_a_peer_comes_with_what_a_link_test_found_lately_on_the_way_from_there_to_here(
    redis_url: str, ledger: WorkerLedger
) -> None:
    for node in ("a", "b", "c"):
        beat(ledger, node, f"{node}:1")
    board = NodeBoard(connect(redis_url))
    measured = link("a", "here")
    for report in (measured, link("b", "here", age_s=2 * LINK_KEPT_S), link("here", "c")):
        board.post_link(report.field, report.model_dump_json())
    board.post_link("unreadable>here", "{}")
    peers = book(redis_url).peers_for("")
    assert peers == (Peer("a", "a:1", measured), Peer("b", "b:1"), Peer("c", "c:1"))


def test_in_a_large_fleet_nobody_is_asked_but_the_node_that_had_the_request(
    redis_url: str, ledger: WorkerLedger
) -> None:
    for number in range(20):
        beat(ledger, f"n{number}", f"n{number}:1")
    known = book(redis_url)
    assert known.peers_for("prefill-3@n7#x") == (Peer("n7", "n7:1"),)
    assert known.peers_for("") == ()


def test_what_was_known_stays_while_the_store_is_away() -> None:
    client = connect("redis://127.0.0.1:9", timeout_s=0.2)
    away = PeerBook("here", "ns", LedgerOverview(client), NodeBoard(client))
    assert away.peers_for("both-0@b#1") == ()


def test_a_worker_names_its_node() -> None:
    assert node_of("prefill-0@node-a#1f") == "node-a"
    assert node_of("") == ""
