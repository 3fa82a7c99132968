"""Which other nodes a sequence's KV blocks may be pulled from."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from pipeline.errors import StoreUnavailable
from pipeline.ledger.node_board import NodeBoard
from pipeline.ledger.overview import LedgerOverview
from pipeline.scheduling.fleet import DEAD_S, Fleet, node_of
from pipeline.scheduling.link_report import LinkReport, link_field
from tiering.kvd.peers import MAX_PEERS
from workers.sequence import Peer

KEPT_S = 5.0  # a node that came or went is noticed that late
LINK_KEPT_S = 86_400.0  # an older measurement of a link says little


@dataclass(slots=True)
class PeerBook:
    """Peers, one a node, from the heartbeats, looked up when somebody asks.

    `namespace`: only nodes that run the same model and layout.
    """

    node: str
    namespace: str
    overview: LedgerOverview
    board: NodeBoard
    _peers: tuple[Peer, ...] = ()
    _read_at_s: float = float("-inf")
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def peers_for(self, came_from: str) -> tuple[Peer, ...]:
        """Where to ask for the blocks of a request that the worker `came_from` had before.

        That worker's node first; where nodes are few, all others behind it, for they may have the
        prefix from other requests. Where they are many nobody asks around.
        """
        peers = self._known()
        node = node_of(came_from)
        first = [peer for peer in peers if peer.node == node]
        others = [peer for peer in peers if peer.node != node]
        if len(peers) > MAX_PEERS:
            others = []
        return (*first, *others)[:MAX_PEERS]

    def _known(self) -> tuple[Peer, ...]:
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._read_at_s > KEPT_S:
                self._read_at_s = now_s
                with suppress(StoreUnavailable):  # what was known last is better than nothing
                    self._peers = self._read()
            return self._peers

    def _read(self) -> tuple[Peer, ...]:
        now_ms, beats = self.overview.beats()
        fleet = Fleet.decode(beats, now_ms)
        addresses = {
            state.node: state.peer_address
            for name, state in sorted(fleet.workers.items())
            if state.peer_address
            and state.node != self.node
            and state.namespace == self.namespace
            and fleet.ages_s[name] < DEAD_S
        }
        names = [link_field(node, self.node) for node in addresses]
        links = {
            link.source: link
            for link in LinkReport.decode(self.board.read_some_links(names))
            if now_ms / 1000 - link.at_s < LINK_KEPT_S
        }
        return tuple(Peer(node, address, links.get(node)) for node, address in addresses.items())
