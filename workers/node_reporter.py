"""Tells the pipeline how the node's cache daemon is, which knows no Redis itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from pipeline.errors import StoreUnavailable
from pipeline.ledger.node_board import NodeBoard
from pipeline.scheduling.node_report import NodeReport
from tiering.errors import KvdUnavailable
from tiering.kvd.operator import KvdOperator

log = structlog.get_logger(__name__)

REPORT_S = 2.0


@dataclass(slots=True)
class NodeReporter:
    """Asks kvd and posts its answer, every two seconds, from a thread of its own.

    Every worker of a node does so: they say the same, and the node is heard of while one lives.
    `on_purge` is called when kvd dropped a tenant's blocks since the look before.
    """

    node: str
    operator: KvdOperator
    board: NodeBoard
    on_purge: Callable[[], object]
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _is_connected: bool = False
    _peer_address: str = ""
    _num_purges: int | None = None

    @property
    def peer_address(self) -> str:
        """Where other nodes may pull this node's blocks from, as kvd said last; empty: nowhere."""
        return self._peer_address

    def start(self) -> None:
        """Report now and then until `close`."""
        self._thread = threading.Thread(target=self._run, name="node-report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; the last report runs out by itself."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def report(self) -> NodeReport:
        """One look at kvd."""
        try:
            if not self._is_connected:
                self.operator.connect()
                self._is_connected = True
            report = NodeReport(node=self.node, kvd=self.operator.stats())
        except KvdUnavailable:
            self._is_connected = False
            report = NodeReport(node=self.node)
        self._peer_address = report.peer_address
        if report.kvd is not None:
            if self._num_purges is not None and report.kvd.num_purges > self._num_purges:
                self.on_purge()
            self._num_purges = report.kvd.num_purges  # a daemon that started anew counts from 0
        return report

    def _run(self) -> None:
        was_away = False
        while True:
            try:
                self.board.post(self.node, self.report().model_dump_json())
                was_away = False
            except StoreUnavailable as error:
                if not was_away:
                    log.warning("node_report_missed", error=str(error))
                was_away = True
            if self._stop.wait(REPORT_S):
                self.operator.close()
                return
