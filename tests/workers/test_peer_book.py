"""Which other nodes are asked for a sequence's blocks, from real heartbeats in a real store."""

from __future__ import annotations

import pytest

from pipeline.ledger.overview import LedgerOverview
from pipeline.ledger.store import connect
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.scheduling.fleet import Role, WorkerState, node_of
from workers.peer_book import PeerBook
from workers.sequence import Peer


def beat(ledger: WorkerLedger, node: str, address: str, *, namespace: str = "ns") -> None:
    worker = f"both-0@{node}#1"
    state = WorkerState(
        worker=worker,
        node=node,
        role=Role.BOTH,
        model="m",
        namespace=namespace,
        queues=("prefill",),
        capacity=4,
        peer_address=address,
    )
    ledger.beat(worker, 5.0, state.model_dump_json())


@pytest.fixture
def ledger(redis_url: str) -> WorkerLedger:
    return WorkerLedger(connect(redis_url), max_attempts=2, retention_s=60)


def book(redis_url: str) -> PeerBook:
    return PeerBook("here", "ns", LedgerOverview(connect(redis_url)))


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


def test_in_a_large_fleet_nobody_is_asked_but_the_node_that_had_the_request(
    redis_url: str, ledger: WorkerLedger
) -> None:
    for number in range(20):
        beat(ledger, f"n{number}", f"n{number}:1")
    known = book(redis_url)
    assert known.peers_for("prefill-3@n7#x") == (Peer("n7", "n7:1"),)
    assert known.peers_for("") == ()


def test_what_was_known_stays_while_the_store_is_away() -> None:
    away = PeerBook("here", "ns", LedgerOverview(connect("redis://127.0.0.1:9", timeout_s=0.2)))
    assert away.peers_for("both-0@b#1") == ()


def test_a_worker_names_its_node() -> None:
    assert node_of("prefill-0@node-a#1f") == "node-a"
    assert node_of("") == ""
