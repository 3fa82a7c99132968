"""What a node's cache daemon tells the pipeline, through the workers of the node."""

from __future__ import annotations

from pipeline.scheduling.stored_report import StoredReport
from tiering.kvd.stats import KvdStats, PeerStats

__all__ = ["KvdStats", "NodeReport", "PeerStats"]


class NodeReport(StoredReport):
    """One look at a node's kvd. `kvd` None: it did not answer."""

    node: str
    kvd: KvdStats | None = None

    @property
    def field(self) -> str:
        """Its name on the board."""
        return self.node

    @property
    def peer_address(self) -> str:
        """Where other nodes' daemons pull blocks from (host:port); empty for nowhere."""
        return self.kvd.lending.address if self.kvd is not None else ""
