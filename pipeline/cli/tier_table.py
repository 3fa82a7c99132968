"""The memory tiers of nodes: a line each for `pointsman status`, all that is counted for `kv stats`.

Both fit 80 columns: what is cut off there is what an operator came for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from pipeline.scheduling.node_report import NodeReport
from tiering.kvd.stats import KvdStats, MoveStats, TierStats

NOTHING = "-"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP, _LARGEST_SHOWN = 1024, 1000
_THOUSANDS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_LEAST_SHORTENED = 10_000
_REASONS = {
    "written_back": "left, written to NVMe",
    "clean": "left, NVMe had them",
    "not_admitted": "left, not worth a write",
    "dropped": "left for good",
    "capacity": "left for younger ones",
    "expired": "left, their time was up",
    "discarded": "discarded or purged",
}


def tier_table(nodes: Sequence[NodeReport]) -> Table:
    """Tiers by node; counts are from the start of the node's kvd."""
    columns = ("node", "tier", "state", "used", "blocks", "hits", "misses", "bad")
    table = plain_table("tiers", *columns)
    for report in nodes:
        if report.kvd is None:
            table.add_row(report.node, NOTHING, Text("kvd is away", style="bold red"))
            continue
        for name, tier in report.kvd.tiers.items():
            if tier.num_slots or tier.num_io_errors:
                table.add_row(report.node, name, *_cells(tier))
    return table


def _cells(tier: TierStats) -> list[str | Text]:
    return [
        _shown_health(tier.health),
        _shown_room(tier) or NOTHING,
        *map(_shown_count, (_num_blocks(tier), tier.num_hits, tier.num_misses)),
        str(tier.num_checksum_failures),
    ]


def stats_table(stats: KvdStats) -> Table:
    """One daemon's tiers side by side; a count that is zero in all of them is left out."""
    tiers = stats.tiers
    table = plain_table(None, "since kvd started", *tiers)
    table.add_row("state", *(_shown_health(tier.health) for tier in tiers.values()))
    rows: dict[str, Callable[[TierStats], str]] = {
        "packed as": lambda tier: tier.form,
        "room in use": _shown_room,
        "blocks that can be read": lambda tier: str(_num_blocks(tier)),
        "blocks under a lease": lambda tier: str(tier.num_leases),
        "asked for and found": lambda tier: str(tier.num_hits),
        "runs that ended at a miss": lambda tier: str(tier.num_misses),
        "stored are": _shown_filter,
        "not stored, no room": lambda tier: str(tier.num_stores_dropped),
        "not stored, used too little": lambda tier: str(tier.num_not_admitted),
        "bad blocks found": lambda tier: str(tier.num_checksum_failures),
        "slots out of use": lambda tier: str(tier.num_quarantined),
        "disk calls that failed": lambda tier: str(tier.num_io_errors),
        "read": lambda tier: _shown_moves(tier.loads),
        "written": lambda tier: _shown_moves(tier.stores),
    }
    for label, shown in rows.items():
        _add_row(table, label, [shown(tier) for tier in tiers.values()])
    for reason in sorted({reason for tier in tiers.values() for reason in tier.evictions}):
        counts = [str(tier.evictions.get(reason, 0)) for tier in tiers.values()]
        _add_row(table, _REASONS.get(reason, f"left, {reason}"), counts)
    return table


def _add_row(table: Table, label: str, cells: Sequence[str]) -> None:
    if set(cells) - {"", "0", NOTHING}:
        table.add_row(label, *(cell or NOTHING for cell in cells))


def peer_table(stats: KvdStats) -> Table:
    """What came from which peer."""
    columns = ("peer", "state", "pulls", "blocks", "moved", "failed", "bad")
    table = plain_table("peers", *columns)
    for peer, seen in stats.peers.items():
        table.add_row(
            peer,
            Text("paused", style="bold red") if seen.is_paused else Text("ok", style="green"),
            _shown_count(seen.num_pulls),
            _shown_count(seen.num_blocks),
            _shown_moves(seen.moves),
            _shown_count(seen.num_failures),
            str(seen.num_corrupt),
        )
    return table


def _num_blocks(tier: TierStats) -> int:
    states: Mapping[str, int] = tier.slots_by_state
    return states.get("ready", 0) + states.get("evicting", 0)


def _shown_health(health: str) -> Text:
    return Text(health, style="green" if health == "on" else "bold red")


def _shown_room(tier: TierStats) -> str:
    size_bytes = tier.num_slots * tier.slot_bytes
    if not size_bytes:
        return ""
    return f"{100 * tier.used_bytes / size_bytes:.0f} % of {shown_bytes(size_bytes)}"


def _shown_filter(tier: TierStats) -> str:
    return "blocks used twice" if tier.is_admission_filtered else "all blocks"


def _shown_count(count: int) -> str:
    """Short where it is large; `--json` has all digits."""
    for size, letter in _THOUSANDS:
        if count >= max(size, _LEAST_SHORTENED):
            return f"{count / size:.4g}{letter}"
    return str(count)


def _shown_moves(moves: MoveStats) -> str:
    if not moves.num_bytes:
        return NOTHING
    return f"{shown_bytes(moves.num_bytes)} at {shown_rate(moves.bytes_per_s)}"


def shown_rate(bytes_per_s: float) -> str:
    """A bandwidth with a fitting unit."""
    is_fast = bytes_per_s >= 1e9  # noqa: PLR2004
    return f"{bytes_per_s / 1e9:.2f} GB/s" if is_fast else f"{bytes_per_s / 1e6:.3g} MB/s"


def shown_bytes(num_bytes: float) -> str:
    """A size with a fitting unit."""
    index = 0
    while num_bytes >= _LARGEST_SHOWN and index < len(_UNITS) - 1:
        num_bytes /= _STEP
        index += 1
    digits = 0 if float(num_bytes).is_integer() else 1
    return f"{num_bytes:.{digits}f} {_UNITS[index]}"


def plain_table(title: str | None, *columns: str) -> Table:
    """A table without lines, its columns never wrapped."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table
