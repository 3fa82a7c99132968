"""`pointsman link-test`: every pair of nodes, both ways, one link at a time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import orjson
from rich.console import Group, RenderableType
from rich.text import Text

from pipeline.cli.errors import CommandRefused
from pipeline.cli.tier_table import NOTHING, plain_table, shown_bytes
from pipeline.ledger.node_board import NodeBoard
from pipeline.ledger.overview import LedgerOverview
from pipeline.ledger.store import connect
from pipeline.scheduling.fleet import Fleet
from pipeline.scheduling.link_report import LinkReport
from pipeline.scheduling.node_report import NodeReport
from tiering.errors import TieringError
from tiering.transports.link_probe import BLOCK_SIZES, LinkProbe, ask_for_probe
from tiering.transports.tcp_transport import TcpTransport

_MBIT = 8 / 1e6


@dataclass(frozen=True, slots=True)
class LinkTest:
    """Which nodes to test, and how long each direction may take."""

    redis_url: str
    secret: bytes
    nodes: tuple[str, ...]
    budget_s: float


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """One direction; `report` None: it could not be measured, and `fault` says why."""

    source: str
    target: str
    report: LinkReport | None
    fault: str = ""


def measure_links(test: LinkTest, on_link: Callable[[str], object]) -> list[MeasuredLink]:
    """Measure and store; `on_link` hears of each direction before it is measured.

    Raises:
        CommandRefused: fewer than two nodes lend blocks, or a named one is not among them.
        StoreUnavailable: Redis is away.
    """
    client = connect(test.redis_url)
    try:
        board = NodeBoard(client)
        _, beats = LedgerOverview(client).beats()
        reports = NodeReport.decode(board.read(Fleet.decode(beats, 0).nodes))
        addresses = {r.node: r.peer_address for r in reports if r.peer_address}
        measured = []
        for source, target in _pairs(addresses, test.nodes):
            on_link(f"{source} to {target}")
            link = _measure_one(test, addresses, source, target)
            if link.report is not None:
                board.post_link(link.report.field, link.report.model_dump_json())
            measured.append(link)
        return measured
    finally:
        client.close()


def kept_links(redis_url: str) -> list[MeasuredLink]:
    """What earlier tests measured. Raises `StoreUnavailable`."""
    client = connect(redis_url)
    try:
        reports = LinkReport.decode(NodeBoard(client).read_links())
    finally:
        client.close()
    return [MeasuredLink(report.source, report.target, report) for report in reports]


def _pairs(addresses: Mapping[str, str], wanted: Sequence[str]) -> list[tuple[str, str]]:
    missing = [node for node in wanted if node not in addresses]
    if missing:
        raise CommandRefused(
            f"{', '.join(missing)}: no such node lends blocks; these do: "
            f"{', '.join(sorted(addresses)) or 'none'} (POINTSMAN_KVD_PEER_PORT)"
        )
    nodes = sorted(wanted or addresses)
    if len(nodes) < 2:  # noqa: PLR2004
        raise CommandRefused(
            "a link needs two nodes that lend blocks (POINTSMAN_KVD_PEER_PORT); "
            f"there is {nodes[0] if nodes else 'none'}"
        )
    return list(itertools.permutations(nodes, 2))


def _measure_one(
    test: LinkTest, addresses: Mapping[str, str], source: str, target: str
) -> MeasuredLink:
    transport = TcpTransport(test.secret)
    there = addresses[source]
    try:
        probe = ask_for_probe(transport, addresses[target], there, BLOCK_SIZES, test.budget_s)
    except TieringError as error:
        return MeasuredLink(source, target, None, str(error))
    return MeasuredLink(source, target, _report(source, target, probe))


def _report(source: str, target: str, probe: LinkProbe) -> LinkReport:
    return LinkReport(
        source=source,
        target=target,
        round_trip_s=probe.round_trip_s,
        bytes_per_s=probe.bytes_per_s,
        kind=probe.kind,
        nominal_bytes_per_s=probe.nominal_bytes_per_s,
        is_slow=probe.is_slow,
        by_block_bytes={s.block_bytes: s.bytes_per_s for s in probe.samples},
        at_s=time.time(),
    )


def links_json(measured: Sequence[MeasuredLink]) -> str:
    """Every link, for a program."""
    rows = [
        link.report.model_dump(mode="json")
        if link.report is not None
        else {"source": link.source, "target": link.target, "fault": link.fault}
        for link in measured
    ]
    return orjson.dumps(rows, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode()


def links_screen(measured: Sequence[MeasuredLink]) -> RenderableType:
    """A table: rates in Mbit/s by block size; then a line for each link that is not as it should be."""
    if not measured:
        return Text("no link was measured yet")
    sizes = [shown_bytes(size) for size in BLOCK_SIZES]
    table = plain_table("links, Mbit/s by block size", "from", "to", "RTT ms", *sizes, "kind")
    faults = []
    for link in measured:
        report = link.report
        if report is None:
            table.add_row(link.source, link.target)
            faults.append(f"{link.source} to {link.target} was not measured: {link.fault}")
            continue
        rates = [report.by_block_bytes.get(size) for size in BLOCK_SIZES]
        table.add_row(
            link.source,
            link.target,
            f"{report.round_trip_s * 1e3:.2f}",
            *(NOTHING if rate is None else f"{rate * _MBIT:.0f}" for rate in rates),
            report.kind,
        )
        if report.is_slow:
            nominal = f"{report.nominal_bytes_per_s * _MBIT:.0f} Mbit/s"
            faults.append(f"{link.source} to {link.target} is slow: its kind should do {nominal}")
    return Group(table, *(Text(fault, style="bold red") for fault in faults))
