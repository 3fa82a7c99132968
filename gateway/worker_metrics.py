"""The workers' numbers as their heartbeats tell them, so that one scrape shows the whole pipeline."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from pipeline.scheduling.fleet import Fleet

_PREFIX = "pointsman_worker_"
_GAUGES = {
    "sequences_running": "Sequences that hold blocks",
    "sequences_waiting": "Sequences that wait for blocks",
    "kv_blocks_used": "Blocks of the HBM pool that sequences hold",
    "kv_blocks_cached": "Blocks of the HBM pool kept for reuse",
    "kv_blocks": "Blocks of the HBM pool",
    "prefill_tokens": "Prompt tokens computed since the worker started",
    "decode_tokens": "Output tokens computed since the worker started",
    "cached_tokens": "Prompt tokens found in a cache since the worker started",
    "preemptions": "Sequences that gave way in a full HBM pool since the worker started",
    "spills": "Of these, the ones stored in the tiers below",
    "kv_prefetched_blocks": "Blocks that NVMe was told to bring up for waiting sequences",
    "heartbeat_age_seconds": "Age of the last heartbeat",
    "stuck": "1: its engine does not come back",
    "unpaired": "1: a prefill worker whose blocks no decode node can read; nothing is sent to it",
}


_LABELS = ("worker", "role", "model")
_BY_REASON = "kv_loads"
_BY_TIER = {
    "kv_load_bytes": "KV bytes that loads got from a tier since the worker started",
    "kv_load_seconds": "Seconds of these loads: nvme up to DRAM, dram from there into HBM",
}


class WorkerMetrics:
    """Gauges per living worker; a worker that is gone takes its series along."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauges = {
            name: Gauge(_PREFIX + name, text, _LABELS, registry=registry)
            for name, text in _GAUGES.items()
        }

        self._gauges[_BY_REASON] = Gauge(
            _PREFIX + _BY_REASON,
            "Loads of cached blocks by the reason of the decision (load or recompute)",
            (*_LABELS, "reason"),
            registry=registry,
        )
        for name, text in _BY_TIER.items():
            self._gauges[name] = Gauge(_PREFIX + name, text, (*_LABELS, "tier"), registry=registry)

    def observe(self, fleet: Fleet) -> None:
        """Show this fleet and nothing else."""
        for gauge in self._gauges.values():
            gauge.clear()
        unpaired = fleet.unpaired()
        for name, state in fleet.workers.items():
            values = {
                "sequences_running": state.num_running,
                "sequences_waiting": state.num_waiting,
                "kv_blocks_used": state.num_used_blocks,
                "kv_blocks_cached": state.num_cached_blocks,
                "kv_blocks": state.num_blocks,
                "prefill_tokens": state.num_prefill_tokens,
                "decode_tokens": state.num_decode_tokens,
                "cached_tokens": state.num_cached_tokens,
                "preemptions": state.num_preemptions,
                "spills": state.num_spills,
                "kv_prefetched_blocks": state.num_prefetched_blocks,
                "heartbeat_age_seconds": fleet.ages_s[name],
                "stuck": int(state.is_stuck),
                "unpaired": int(name in unpaired),
            }
            # Without the part that differs from start to start: series must not pile up.
            labels = (name.partition("#")[0], str(state.role), state.model)
            for key, value in values.items():
                self._gauges[key].labels(*labels).set(value)
            for reason, count in state.load_reasons.items():
                self._gauges[_BY_REASON].labels(*labels, reason).set(count)
            for tier, loads in state.tier_loads.items():
                self._gauges["kv_load_bytes"].labels(*labels, tier).set(loads.num_bytes)
                self._gauges["kv_load_seconds"].labels(*labels, tier).set(loads.seconds)
