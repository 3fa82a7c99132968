"""Requests that wait outside of the worker: their blocks come up from NVMe before their turn comes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from pipeline.errors import StoreUnavailable
from pipeline.ledger.worker_ledger import WaitingRequest, WorkerLedger
from tiering.block_hash import BlockHasher
from workers.kv_jobs import PrefetchJob
from workers.settings import EngineSettings
from workers.step_loop import Engine

log = structlog.get_logger(__name__)

LOOK_S = 0.2
MAX_AHEAD = 4  # requests


class _Hint(NamedTuple):
    """What was asked for one request; the job loses its keys as they come."""

    job: PrefetchJob
    num_blocks: int


@dataclass(slots=True)
class LookAhead:
    """Looks at who is next while all places are taken, and has the tiers fetch for the first of them.

    For `MAX_AHEAD` at most, and no more blocks in all than half of the engine's pool. What was not begun
    for a request that waits no more (it started, here or elsewhere, or was cancelled) is dropped.
    Another worker of the node may ask for the same: the daemon fetches once.
    """

    queues: tuple[str, ...]
    ledger: WorkerLedger
    engine: Engine
    settings: EngineSettings
    key_root_for: Callable[[str, str], bytes]
    _hints: dict[str, _Hint] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Look now and then until `close`, in a thread."""
        self._thread = threading.Thread(target=self._run, name="look-ahead", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def look(self) -> None:
        """One look. Raises `StoreUnavailable`."""
        known = self._hints.keys()
        line = self.ledger.next_in_line(self.queues, MAX_AHEAD, known) if self._is_full() else []
        waiting = {request.request_id for request in line}
        for request_id in self._hints.keys() - waiting:
            self._hints.pop(request_id).job.is_abandoned = True
        for request in line:
            if request.request_id not in self._hints:
                self._hint(request)

    def _hint(self, request: WaitingRequest) -> None:
        """Unless there is nothing to fetch for it, or no room for more."""
        sampling, block_tokens = request.sampling, self.settings.block_tokens
        if not sampling.uses_cache or sampling.scores_prompt:
            return
        num_left = self.settings.num_blocks // 2 - sum(
            hint.num_blocks for hint in self._hints.values()
        )
        num_tokens = min(len(request.prompt_tokens) - 1, max(num_left, 0) * block_tokens)
        root = self.key_root_for(request.tenant_salt, sampling.cache_salt)
        keys = BlockHasher(root).keys(request.prompt_tokens[:num_tokens], block_tokens)
        if keys:
            hint = self._hints[request.request_id] = _Hint(PrefetchJob(keys), len(keys))
            self.engine.foresee(hint.job)

    def _is_full(self) -> bool:
        stats = self.engine.stats()
        num_taken = stats.running + stats.loading + stats.storing
        return stats.waiting > 0 or num_taken >= self.settings.max_batch_sequences

    def _run(self) -> None:
        has_failed = False  # said once
        while not self._stop.wait(LOOK_S):
            try:
                self.look()
                has_failed = False
            except StoreUnavailable as error:
                if not has_failed:
                    log.warning("look_ahead_missed", error=str(error))
                has_failed = True
            except Exception:
                # The edge of this thread: a worker must not end for blocks that come later.
                if not has_failed:
                    log.exception("look_ahead_failed")
                has_failed = True
