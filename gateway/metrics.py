"""The gateway's own numbers. Labels come from closed sets, never from clients."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.ledger_metrics import LedgerMetrics
from gateway.tier_metrics import TierMetrics
from gateway.worker_metrics import WorkerMetrics
from pipeline.ledger.backlog import Backlog
from pipeline.protocol.stream import RequestUsage, StreamEnded, StreamEvent, TokensArrived
from pipeline.scheduling.fleet import EMPTY_FLEET, Fleet
from pipeline.scheduling.node_report import NodeReport

Event = tuple[int, StreamEvent]
_TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_TOTAL_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PREFIX = "pointsman_gateway_"


def _webhook_counter(registry: CollectorRegistry) -> Counter:
    text = "Webhooks by what became of a try: delivered, failed, given_up"
    return Counter(f"{_PREFIX}webhooks", text, ("result",), registry=registry)


def _gauge(registry: CollectorRegistry, name: str, text: str) -> Gauge:
    return Gauge(_PREFIX + name, text, ("model",), registry=registry)


def _histogram(
    registry: CollectorRegistry, name: str, text: str, buckets: Sequence[float]
) -> Histogram:
    return Histogram(_PREFIX + name, text, ("model",), buckets=buckets, registry=registry)


class GatewayMetrics:
    """Counters of one gateway process, in a registry of their own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.http_requests = Counter(
            f"{_PREFIX}http_requests",
            "Answers by route and class of status",
            ("route", "status"),
            registry=registry,
        )
        self.waiting = _gauge(registry, "requests_waiting", "Generations without a first token")
        self.running = _gauge(registry, "requests_running", "Generations between tokens")
        self.abandoned = Counter(
            f"{_PREFIX}requests_abandoned",
            "Generations given up: client left, failed, drained",
            registry=registry,
        )
        self.time_to_first_token = _histogram(
            registry,
            "time_to_first_token_seconds",
            "From the end of submission to the first token",
            _TTFT_BUCKETS_S,
        )
        self.time_per_output_token = _histogram(
            registry,
            "time_per_output_token_seconds",
            "Mean time between the tokens of a request, after the first",
            _TPOT_BUCKETS_S,
        )
        self.duration = _histogram(
            registry,
            "request_duration_seconds",
            "From the end of submission to the last token",
            _TOTAL_BUCKETS_S,
        )
        self.tokens = Counter(
            f"{_PREFIX}tokens",
            "Tokens of ended requests: prompt, cached of these, completion",
            ("kind", "model"),
            registry=registry,
        )
        self.ignored_fields = Counter(
            f"{_PREFIX}ignored_fields", "Body fields passed over", ("field",), registry=registry
        )

        self.webhooks = _webhook_counter(registry)
        self.batch_lines = Gauge(
            f"{_PREFIX}batch_lines_in_flight",
            "Lines of batches that this process has in the pipeline; 0 where another one runs them",
            registry=registry,
        )
        self.workers = WorkerMetrics(registry)
        self.tiers = TierMetrics()
        self.ledger = LedgerMetrics()
        registry.register(self.tiers)
        registry.register(self.ledger)

    def text(
        self,
        fleet: Fleet | None,
        backlog: Backlog | None,
        nodes: Sequence[NodeReport],
        models: Mapping[str, str],
    ) -> bytes:
        """Prometheus' text format; what is None, since Redis is away, is left out.

        `models` are their names by slug.
        """
        self.workers.observe(fleet or EMPTY_FLEET)
        self.tiers.observe(nodes)
        self.ledger.observe(backlog, models)
        return generate_latest(self._registry)

    def count_ignored(self, fields: Sequence[str]) -> None:
        """Count body fields that were passed over."""
        for field in fields:
            self.ignored_fields.labels(field).inc()

    async def metered(
        self, events: AsyncGenerator[Event, None], model: str
    ) -> AsyncGenerator[Event, None]:
        """The same events, observed; gauges are back at rest when this is closed, however it ends.

        `model` is a served one's own name.
        """
        start_s = first_s = time.monotonic()
        gauge = waiting = self.waiting.labels(model)
        gauge.inc()
        ended: RequestUsage | None = None
        try:
            async with aclosing(events):
                async for index, event in events:
                    if gauge is waiting and isinstance(event, TokensArrived):
                        first_s = time.monotonic()
                        self.time_to_first_token.labels(model).observe(first_s - start_s)
                        gauge.dec()
                        gauge = self.running.labels(model)
                        gauge.inc()
                    elif isinstance(event, StreamEnded):
                        ended = event.usage
                    yield index, event
        finally:
            gauge.dec()
            if ended is not None:
                self._count_ended(model, ended, start_s, first_s)

    def _count_ended(self, model: str, usage: RequestUsage, start_s: float, first_s: float) -> None:
        end_s = time.monotonic()
        self.duration.labels(model).observe(end_s - start_s)
        if usage.completion_tokens > 1:
            between_s = (end_s - first_s) / (usage.completion_tokens - 1)
            self.time_per_output_token.labels(model).observe(between_s)
        self.tokens.labels("prompt", model).inc(usage.prompt_tokens)
        self.tokens.labels("cached", model).inc(usage.cached_tokens)
        self.tokens.labels("completion", model).inc(usage.completion_tokens)
