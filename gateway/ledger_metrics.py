"""What the ledger holds, as every gateway sees it: one scrape of any of them shows all queues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pipeline.ledger.backlog import Backlog
from pipeline.ledger.keys import slug_of


class LedgerMetrics(Collector):
    """Shows the backlog it was given last; without one, as when Redis is away, nothing at all."""

    def __init__(self) -> None:
        self._backlog: Backlog | None = None
        self._names: Mapping[str, str] = {}

    def observe(self, backlog: Backlog | None, names: Mapping[str, str]) -> None:
        """Show this one; `names` are those of models by slug, and a slug names a model without one."""
        self._backlog, self._names = backlog, names

    def collect(self) -> Iterator[Metric]:
        """Gauges of the requests that are open, counts of what became of all others."""
        backlog = self._backlog
        if backlog is None:
            return
        waiting = GaugeMetricFamily(
            "pointsman_queue_requests_waiting",
            "Requests that wait in a queue, held back or with a message",
            labels=("queue", "model"),
        )
        for queue, count in backlog.waiting.items():
            waiting.add_metric((queue, self._name_of(slug_of(queue))), count)
        yield waiting
        yield from self._open(backlog)
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

    def _open(self, backlog: Backlog) -> Iterator[Metric]:
        is_open = GaugeMetricFamily(
            "pointsman_ledger_requests_open", "Requests that have not ended", labels=("model",)
        )
        held = GaugeMetricFamily(
            "pointsman_ledger_requests_held",
            "Requests that wait in their tenant's line without a message",
            labels=("model",),
        )
        for slug, model in backlog.models.items():
            is_open.add_metric((self._name_of(slug),), model.num_open)
            held.add_metric((self._name_of(slug),), model.num_held)
        yield from (is_open, held)

    def _name_of(self, slug: str) -> str:
        return self._names.get(slug, slug)
