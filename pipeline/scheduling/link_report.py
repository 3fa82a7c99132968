"""Links between nodes as `pointsman link-test` measured them, for whoever plans a move."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.scheduling.stored_report import StoredReport


class LinkReport(StoredReport):
    """One direction: blocks that lie on `source`, wanted on `target`.

    `bytes_per_s` is the best of the block sizes, `by_block_bytes` the rate of each. `is_slow`: well
    below what a link of this `kind` should do. `at_s` is Unix time.
    """

    source: str
    target: str
    round_trip_s: float
    bytes_per_s: float
    kind: str
    nominal_bytes_per_s: float
    is_slow: bool
    by_block_bytes: Mapping[int, float]
    at_s: float

    @property
    def field(self) -> str:
        """Its name on the board."""
        return link_field(self.source, self.target)


def link_field(source: str, target: str) -> str:
    """Name of the link from one node to another."""
    return f"{source}>{target}"
