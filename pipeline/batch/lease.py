"""Which one of all gateway processes runs the batches."""

from __future__ import annotations

import time

import redis.asyncio
import structlog
from redis.exceptions import LockError

from pipeline.errors import StoreUnavailable
from pipeline.ledger.store import store_errors

log = structlog.get_logger(__name__)

LEASE_S = 4.0
_LOCK_NAME = "batch_runner"


class RunnerLease:
    """A lock in Redis that has to be renewed; whoever falls silent loses it.

    Two holders for a moment (one was frozen) do no harm: both use the same request ids, and the
    database takes one result per line.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._lock = client.lock(
            _LOCK_NAME,
            timeout=LEASE_S,
            blocking=False,
            thread_local=False,
            raise_on_release_error=False,
        )
        self._held_until_s: float | None = None

    async def hold(self) -> bool:
        """Take or renew the lease; True while it is ours. To be called every second or so.

        Without an answer of Redis it stays ours for as long as nobody else can have taken it.
        """
        asked_s = time.monotonic()
        try:
            with store_errors():
                is_ours = await self._renew() if self._held_until_s else await self._lock.acquire()
        except StoreUnavailable:
            return self._held_until_s is not None and asked_s < self._held_until_s
        if is_ours and self._held_until_s is None:
            log.info("batch_runner_leads")
        elif not is_ours and self._held_until_s is not None:
            log.warning("batch_runner_lease_lost")
        self._held_until_s = asked_s + LEASE_S if is_ours else None
        return is_ours

    async def release(self) -> None:
        """Let another process take over at once."""
        if self._held_until_s is None:
            return
        self._held_until_s = None
        try:
            with store_errors():
                await self._lock.release()
        except (StoreUnavailable, LockError):
            log.info("batch_runner_left_without_store")

    async def _renew(self) -> bool:
        try:
            return bool(await self._lock.reacquire())
        except LockError:  # it ran out, and somebody else may have it
            return False
