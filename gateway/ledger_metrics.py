"""What the ledger holds, as every gateway sees it: one scrape of any of them shows all queues."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pipeline.ledger.backlog import Backlog


class LedgerMetrics(Collector):
    """Shows the backlog it was given last; without one, as when Redis is away, nothing at all."""

    def __init__(self) -> None:
        self.backlog: Backlog | None = None

    def collect(self) -> Iterator[Metric]:
        """Gauges of the requests that are open, counts of what became of all others."""
        backlog = self.backlog
        if backlog is None:
            return
        waiting = GaugeMetricFamily(
            "pointsman_queue_requests_waiting",
            "Requests that wait in a queue, held back or with a message",
            labels=("queue",),
        )
        for queue, count in backlog.waiting.items():
            waiting.add_metric((queue,), count)
        yield waiting
        yield GaugeMetricFamily(
            "pointsman_ledger_requests_open", "Requests that have not ended", backlog.num_open
        )
        yield GaugeMetricFamily(
            "pointsman_ledger_requests_held",
            "Requests that wait in their tenant's line without a message",
            backlog.num_held,
        )
        yield GaugeMetricFamily(
            "pointsman_ledger_dead_letters",
            "Requests that were given up because their workers were lost",
            backlog.num_dead_letters,
        )
        events = CounterMetricFamily(
            "pointsman_ledger_requests",
            "Requests by event: submitted, refused, requeued, or the state in which they ended",
            labels=("event",),
        )
        for event, count in sorted(backlog.events.items()):
            events.add_metric((event,), count)
        yield events
