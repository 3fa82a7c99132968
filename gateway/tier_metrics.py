"""The memory tiers of every node as its cache daemon counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.scheduling.node_report import KvdStats, NodeReport, PeerStats

_KVD = "pointsman_kvd_"
_TIER = "pointsman_tier_"
_PEER = "pointsman_peer_"
_HEALTHS = ("on", "read_only", "off")
_KVD_GAUGES = {
    "holders": ("num_holders", "Processes that hold the slab"),
    "leases": ("num_leases", "Leases alive"),
    "reservations": ("num_reservations", "Blocks being written by holders"),
}
_TIER_GAUGES = {
    "used_bytes": ("used_bytes", "Bytes of slots in use"),
    "ready_bytes": ("ready_bytes", "Bytes of slots that can be read"),
    "admission_filtered": ("is_admission_filtered", "1 while blocks used once are not stored"),
}
_TIER_COUNTERS = {
    "hits": ("num_hits", "Blocks asked for and found"),
    "misses": ("num_misses", "First blocks of a run that were not found"),
    "checksum_failures": ("num_checksum_failures", "Blocks whose bytes were not those stored"),
    "stores_dropped": ("num_stores_dropped", "Blocks for which there was no room"),
    "stores_not_admitted": ("num_not_admitted", "Blocks not worth a write"),
    "io_errors": ("num_io_errors", "Disk calls that failed"),
}


class TierMetrics(Collector):
    """Shows the last reports; a node that is gone takes its series along."""

    def __init__(self) -> None:
        self._reports: Sequence[NodeReport] = ()

    def observe(self, reports: Sequence[NodeReport]) -> None:
        """Show these and nothing else."""
        self._reports = reports

    def collect(self) -> Iterator[Metric]:
        """All families, those without a series too."""
        up = GaugeMetricFamily(f"{_KVD}up", "1 while the cache daemon answers", labels=("node",))
        for report in self._reports:
            up.add_metric((report.node,), report.kvd is not None)
        yield up
        nodes = [(report.node, report.kvd) for report in self._reports if report.kvd is not None]
        yield from _daemons(nodes)
        yield from _tiers(nodes)
        yield from _moves(nodes)
        yield from _peers(nodes)


_Nodes = Iterable[tuple[str, KvdStats]]


def _daemons(nodes: _Nodes) -> Iterator[Metric]:
    for name, (field, text) in _KVD_GAUGES.items():
        family = GaugeMetricFamily(_KVD + name, text, labels=("node",))
        for node, kvd in nodes:
            family.add_metric((node,), getattr(kvd, field))
        yield family
    refused = CounterMetricFamily(
        f"{_KVD}commits_refused", "Written blocks whose reservation was gone", labels=("node",)
    )
    for node, kvd in nodes:
        refused.add_metric((node,), kvd.num_commits_refused)
    yield refused


def _tiers(nodes: _Nodes) -> Iterator[Metric]:
    labels = ("node", "tier")
    capacity = GaugeMetricFamily(f"{_TIER}capacity_bytes", "Bytes of all slots", labels=labels)
    blocks = GaugeMetricFamily(f"{_TIER}blocks", "Slots by state", labels=(*labels, "state"))
    health = GaugeMetricFamily(
        f"{_TIER}health", "1 for what the tier is trusted with now", labels=(*labels, "health")
    )
    evictions = CounterMetricFamily(
        f"{_TIER}evictions", "Blocks that left, by reason", labels=(*labels, "reason")
    )
    families: list[tuple[GaugeMetricFamily | CounterMetricFamily, str]] = [
        *(
            (GaugeMetricFamily(_TIER + n, t, labels=labels), f)
            for n, (f, t) in _TIER_GAUGES.items()
        ),
        *(
            (CounterMetricFamily(_TIER + n, t, labels=labels), f)
            for n, (f, t) in _TIER_COUNTERS.items()
        ),
    ]
    for node, kvd in nodes:
        for name, tier in kvd.tiers.items():
            capacity.add_metric((node, name), tier.num_slots * tier.slot_bytes)
            blocks.add_metric((node, name, "quarantined"), tier.num_quarantined)
            for state, count in tier.slots_by_state.items():
                blocks.add_metric((node, name, state), count)
            for level in _HEALTHS:
                health.add_metric((node, name, level), tier.health == level)
            for reason, count in tier.evictions.items():
                evictions.add_metric((node, name, reason), count)
            for family, field in families:
                family.add_metric((node, name), getattr(tier, field))
    yield from (capacity, blocks, health, evictions)
    yield from (family for family, _ in families)


def _moves(nodes: _Nodes) -> Iterator[Metric]:
    labels = ("node", "tier", "direction")
    num_bytes = CounterMetricFamily(f"{_TIER}moved_bytes", "Bytes read and written", labels=labels)
    seconds = CounterMetricFamily(f"{_TIER}move_seconds", "Time that the moves took", labels=labels)
    rate = GaugeMetricFamily(f"{_TIER}bytes_per_second", "Rate of late moves", labels=labels)
    for node, kvd in nodes:
        for name, tier in kvd.tiers.items():
            for direction, moves in (("load", tier.loads), ("store", tier.stores)):
                num_bytes.add_metric((node, name, direction), moves.num_bytes)
                seconds.add_metric((node, name, direction), moves.seconds)
                rate.add_metric((node, name, direction), moves.bytes_per_s)
    yield from (num_bytes, seconds, rate)


def _peers(nodes: _Nodes) -> Iterator[Metric]:
    """By node, not by pair of nodes: those are too many. `pointsman kv stats` shows the pairs."""
    columns: list[tuple[str, str, Callable[[KvdStats], float]]] = [
        ("pulled_blocks", "Blocks from peers", _sum_of(lambda p: p.num_blocks)),
        ("pulled_bytes", "Bytes of blocks from peers", _sum_of(lambda p: p.moves.num_bytes)),
        ("pull_seconds", "Time that pulls took", _sum_of(lambda p: p.moves.seconds)),
        ("pull_failures", "Questions to peers that failed", _sum_of(lambda p: p.num_failures)),
        ("corrupt_blocks", "Bad blocks from peers", _sum_of(lambda p: p.num_corrupt)),
        ("lent_blocks", "Blocks that peers pulled from here", lambda k: k.lending.num_blocks),
        ("lent_bytes", "Bytes that peers pulled from here", lambda k: k.lending.num_bytes),
    ]
    for name, text, value_of in columns:
        family = CounterMetricFamily(_PEER + name, text, labels=("node",))
        for node, kvd in nodes:
            family.add_metric((node,), value_of(kvd))
        yield family
    paused = GaugeMetricFamily(f"{_PEER}paused", "Peers not asked for a while", labels=("node",))
    for node, kvd in nodes:
        paused.add_metric((node,), sum(peer.is_paused for peer in kvd.peers.values()))
    yield paused


def _sum_of(value: Callable[[PeerStats], float]) -> Callable[[KvdStats], float]:
    return lambda kvd: sum(value(peer) for peer in kvd.peers.values())
