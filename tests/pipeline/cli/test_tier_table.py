"""What an operator sees of tiers, links and blocks, on a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console, RenderableType

from pipeline.cli.link_test import MeasuredLink, links_screen
from pipeline.cli.tier_table import peer_table, shown_bytes, shown_rate, stats_table, tier_table
from pipeline.scheduling.link_report import LinkReport
from pipeline.scheduling.node_report import NodeReport
from tiering.kvd.stats import KvdStats, LendingStats, MoveStats, PeerStats, TierStats


def a_tier(**fields: Any) -> TierStats:
    usual: dict[str, Any] = {
        "num_slots": 2912,
        "slot_bytes": 368_640,
        "used_bytes": 2900 * 368_640,
        "slots_by_state": {"free": 12, "ready": 2880, "reserved": 12, "evicting": 8},
        "num_quarantined": 0,
        "num_leases": 3,
        "num_hits": 1_234_567,
        "num_misses": 23_456,
        "num_checksum_failures": 1,
        "num_stores_dropped": 0,
        "num_io_errors": 0,
        "evictions": {"clean": 0, "dropped": 12_345_678},
        "health": "on",
        "loads": MoveStats(10**10, 3.0, 3.2e9),
    }
    return TierStats(**usual | fields)


STATS = KvdStats(
    block_bytes=368_640,
    num_holders=2,
    num_leases=3,
    num_reservations=1,
    num_commits_refused=0,
    tiers={
        "dram": a_tier(),
        "nvme": a_tier(
            health="read_only",
            form="int8.v1",
            num_io_errors=3,
            num_quarantined=2,
            num_not_admitted=88,
            is_admission_filtered=True,
            evictions={"capacity": 77, "of_tomorrow": 5},
        ),
    },
    peers={
        "10.100.100.112:17411": PeerStats(
            123_456, 345_678, 1, 0, is_paused=True, moves=MoveStats(10**12, 1.0, 6.1e6)
        )
    },
    lending=LendingStats("10.0.0.11:7411", 33, 33 * 368_640),
)


def shown(screen: RenderableType) -> list[str]:
    """Its lines at 80 columns; nothing was cut off."""
    console = Console(width=80)
    with console.capture() as captured:
        console.print(screen)
    lines = captured.get().splitlines()
    assert not [line for line in lines if "…" in line]
    return [" ".join(line.split()) for line in lines]


def test_a_line_of_a_tier_fits() -> None:
    lines = shown(
        tier_table([NodeReport(node="node-in-rack", kvd=STATS), NodeReport(node="node-b")])
    )
    assert lines[2:] == [
        "node-in-rack dram on 100 % of 1.0 GiB 2888 1.235M 23.46k 1",
        "node-in-rack nvme read_only 100 % of 1.0 GiB 2888 1.235M 23.46k 1",
        "node-b - kvd is away",
    ]


def test_a_daemons_counts_fit_and_say_what_they_are() -> None:
    assert shown(stats_table(STATS)) == [
        "since kvd started dram nvme",
        "state on read_only",
        "packed as - int8.v1",
        "room in use 100 % of 1.0 GiB 100 % of 1.0 GiB",
        "blocks that can be read 2888 2888",
        "blocks under a lease 3 3",
        "asked for and found 1234567 1234567",
        "runs that ended at a miss 23456 23456",
        "stored are all blocks blocks used twice",
        "not stored, used too little 0 88",
        "bad blocks found 1 1",
        "slots out of use 0 2",
        "disk calls that failed 0 3",
        "read 9.3 GiB at 3.20 GB/s 9.3 GiB at 3.20 GB/s",
        "left for younger ones 0 77",
        "left for good 12345678 0",
        "left, of_tomorrow 0 5",
    ]


def test_a_peers_line_fits() -> None:
    assert shown(peer_table(STATS))[-1] == (
        "10.100.100.112:17411 paused 123.5k 345.7k 931.3 GiB at 6.1 MB/s 1 0"
    )


def a_link(source: str, **fields: Any) -> MeasuredLink:
    usual: dict[str, Any] = {
        "source": source,
        "target": "node-xyz",
        "round_trip_s": 0.0021,
        "bytes_per_s": 1.2e9,
        "kind": "eth0, 10000 Mbit/s",
        "nominal_bytes_per_s": 1.25e9,
        "is_slow": False,
        "by_block_bytes": {64 << 10: 1e8, 256 << 10: 2e8, 1 << 20: 1.2e9, 4 << 20: 1.2e9},
        "at_s": 0.0,
    }
    report = LinkReport(**usual | fields)
    return MeasuredLink(source, report.target, report)


def test_links_fit_and_what_is_wrong_with_one_stands_below() -> None:
    lines = shown(
        links_screen(
            [
                a_link("node-abc"),
                a_link("node-b", is_slow=True),
                MeasuredLink("node-c", "node-d", None, "peer 10.0.0.1:7000 is unavailable: late"),
            ]
        )
    )
    assert lines[2] == "node-abc node-xyz 2.10 800 1600 9600 9600 eth0, 10000 Mbit/s"
    assert lines[4:] == [
        "node-c node-d",
        "node-b to node-xyz is slow: its kind should do 10000 Mbit/s",
        "node-c to node-d was not measured: peer 10.0.0.1:7000 is unavailable: late",
    ]
    assert shown(links_screen([])) == ["no link was measured yet"]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (65_536, "64 KiB"),
        (368_641, "360.0 KiB"),
        (1023 << 20, "1.0 GiB"),
        (2**45, "32 TiB"),
    ],
)
def test_a_size_has_the_unit_that_fits(num_bytes: int, text: str) -> None:
    assert shown_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(6.1e6, "6.1 MB/s"), (1.15e8, "115 MB/s"), (2.5e9, "2.50 GB/s")]
)
def test_a_slow_rate_is_not_rounded_to_nothing(rate: float, text: str) -> None:
    assert shown_rate(rate) == text
