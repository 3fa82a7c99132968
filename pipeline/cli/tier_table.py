"""A line per memory tier of each node, for `pointsman status` and `pointsman kv stats`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from pipeline.scheduling.node_report import NodeReport
from tiering.kvd.stats import KvdStats, MoveStats, TierStats

NOTHING = "-"
_UNITS = ("B", "KiB", "MiB", "GiB")
_STEP = 1024


def tier_table(nodes: Sequence[NodeReport]) -> Table:
    """Tiers by node; counts are from the start of the node's kvd."""
    columns = ("node", "tier", "state", "used", "of", "blocks", "hits", "misses", "evicted")
    table = plain_table("tiers", *columns, "bad", "loads", "stores")
    for report in nodes:
        if report.kvd is None:
            table.add_row(report.node, NOTHING, Text("kvd is away", style="bold red"))
            continue
        for name, tier in report.kvd.tiers.items():
            if tier.num_slots or tier.num_io_errors:
                table.add_row(report.node, name, *_cells(tier))
    return table


def peer_table(stats: KvdStats) -> Table:
    """What came from which peer, and what was lent."""
    columns = ("peer", "state", "pulls", "blocks", "bytes", "failures", "bad")
    lending = stats.lending
    where = lending.address or "nowhere"
    lent = f"lent {lending.num_blocks} blocks, {shown_bytes(lending.num_bytes)}, at {where}"
    table = plain_table(f"peers ({lent})", *columns)
    for peer, seen in stats.peers.items():
        table.add_row(
            peer,
            Text("paused", style="bold red") if seen.is_paused else Text("ok", style="green"),
            str(seen.num_pulls),
            str(seen.num_blocks),
            _shown_moves(seen.moves),
            str(seen.num_failures),
            str(seen.num_corrupt),
        )
    return table


def _cells(tier: TierStats) -> list[str | Text]:
    reasons = "  ".join(
        f"{reason} {count}" for reason, count in sorted(tier.evictions.items()) if count
    )
    return [
        Text(
            " ".join(filter(None, (tier.health, tier.form))),
            style="green" if tier.health == "on" else "bold red",
        ),
        shown_bytes(tier.used_bytes),
        shown_bytes(tier.num_slots * tier.slot_bytes),
        str(tier.slots_by_state.get("ready", 0)),
        str(tier.num_hits),
        str(tier.num_misses),
        reasons or NOTHING,
        str(tier.num_checksum_failures),
        _shown_moves(tier.loads),
        _shown_moves(tier.stores),
    ]


def _shown_moves(moves: MoveStats) -> str:
    if not moves.num_bytes:
        return NOTHING
    return f"{shown_bytes(moves.num_bytes)} at {moves.bytes_per_s / 1e9:.2f} GB/s"


def shown_bytes(num_bytes: float) -> str:
    """A size with a fitting unit."""
    for unit in _UNITS[:-1]:
        if num_bytes < _STEP:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= _STEP
    return f"{num_bytes:.1f} {_UNITS[-1]}"


def plain_table(title: str, *columns: str) -> Table:
    """A table without lines, its columns never wrapped."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table
