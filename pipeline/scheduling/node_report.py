"""What a node's cache daemon tells the pipeline, through the workers of the node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from tiering.kvd.stats import KvdStats, PeerStats

__all__ = ["KvdStats", "NodeReport", "PeerStats"]


class NodeReport(BaseModel):
    """One look at a node's kvd. `kvd` None: it did not answer."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    node: str
    kvd: KvdStats | None = None

    @property
    def peer_address(self) -> str:
        """Where other nodes' daemons pull blocks from (host:port); empty for nowhere."""
        return self.kvd.lending.address if self.kvd is not None else ""

    @classmethod
    def decode(cls, reports: Iterable[bytes]) -> list[Self]:
        """Read what lies in the store; what another build wrote and we cannot read is left out."""
        decoded = []
        for report in reports:
            try:
                decoded.append(cls.model_validate_json(report))
            except ValidationError:
                continue
        return sorted(decoded, key=lambda report: report.node)
