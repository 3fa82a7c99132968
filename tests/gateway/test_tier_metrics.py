"""The tiers of all nodes on the gateway's metrics page."""

from __future__ import annotations

from dataclasses import replace

from gateway.metrics import GatewayMetrics
from pipeline.scheduling.node_report import KvdStats, NodeReport, PeerStats
from tiering.kvd.stats import MoveStats, TierStats

DRAM = TierStats(
    num_slots=10,
    slot_bytes=4096,
    used_bytes=8192,
    slots_by_state={"free": 8, "ready": 2},
    num_quarantined=0,
    num_leases=1,
    num_hits=5,
    num_misses=3,
    num_checksum_failures=1,
    num_stores_dropped=0,
    num_io_errors=0,
    evictions={"clean": 4},
    health="on",
    loads=MoveStats(num_bytes=20480, seconds=0.5, bytes_per_s=40960.0),
)
STATS = KvdStats(
    block_bytes=4000,
    num_holders=2,
    num_leases=1,
    num_reservations=0,
    num_commits_refused=0,
    tiers={"dram": DRAM, "nvme": replace(DRAM, health="read_only", num_quarantined=2)},
    peers={
        "10.0.0.2:7": PeerStats(4, 30, 1, 1, True, MoveStats(3000, 2.0, 1500.0)),
        "10.0.0.3:7": PeerStats(1, 12, 0, 0, False, MoveStats(1200, 1.0, 1200.0)),
    },
)


def lines(*reports: NodeReport) -> set[str]:
    return set(GatewayMetrics().text(None, None, reports, {}).decode().splitlines())


def test_each_tier_of_each_node_has_its_series() -> None:
    shown = lines(NodeReport(node="a", kvd=STATS), NodeReport(node="b", kvd=STATS))
    for line in (
        'pointsman_kvd_up{node="b"} 1.0',
        'pointsman_kvd_holders{node="a"} 2.0',
        'pointsman_tier_capacity_bytes{node="a",tier="dram"} 40960.0',
        'pointsman_tier_blocks{node="a",state="ready",tier="dram"} 2.0',
        'pointsman_tier_blocks{node="a",state="quarantined",tier="nvme"} 2.0',
        'pointsman_tier_hits_total{node="a",tier="dram"} 5.0',
        'pointsman_tier_misses_total{node="a",tier="dram"} 3.0',
        'pointsman_tier_checksum_failures_total{node="a",tier="dram"} 1.0',
        'pointsman_tier_evictions_total{node="a",reason="clean",tier="dram"} 4.0',
        'pointsman_tier_moved_bytes_total{direction="load",node="a",tier="dram"} 20480.0',
        'pointsman_tier_move_seconds_total{direction="load",node="a",tier="dram"} 0.5',
        'pointsman_tier_health{health="read_only",node="a",tier="nvme"} 1.0',
        'pointsman_tier_health{health="on",node="a",tier="nvme"} 0.0',
        'pointsman_peer_pulled_bytes_total{node="a"} 4200.0',
        'pointsman_peer_corrupt_blocks_total{node="a"} 1.0',
        'pointsman_peer_paused{node="a"} 1.0',
    ):
        assert line in shown, line


def test_a_daemon_that_is_away_shows_as_down_and_without_tiers() -> None:
    shown = lines(NodeReport(node="a"))
    assert 'pointsman_kvd_up{node="a"} 0.0' in shown
    assert not [line for line in shown if line.startswith("pointsman_tier_")]


def test_a_report_of_another_build_is_passed_over() -> None:
    good = NodeReport(node="a", kvd=STATS).model_dump_json().encode()
    assert [r.node for r in NodeReport.decode([b"{", b'{"node":"b","kvd":{"tiers":7}}', good])] == [
        "a"
    ]
    assert NodeReport.decode([good])[0].kvd == STATS
