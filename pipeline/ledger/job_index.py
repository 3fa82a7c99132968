"""The list of a tenant's jobs: newest first, read in bounded slices, pruned as it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from pipeline.errors import RequestUnknown
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.keys import jobs_key
from pipeline.ledger.store import store_errors
from pipeline.protocol.stream import RequestStatus

SLICE = 200


@dataclass(frozen=True, slots=True)
class JobQuery:
    """Which part of the list: `limit` jobs behind the one called `after` that `is_wanted`."""

    limit: int
    is_wanted: Callable[[RequestStatus], bool]
    after: str | None = None
    ascending: bool = False


@dataclass(frozen=True, slots=True)
class JobPage:
    """One page in the order that was asked for."""

    jobs: list[RequestStatus]
    has_more: bool


class JobIndex:
    """Reads what `submit.lua` writes: at most the 10,000 newest jobs of a tenant."""

    def __init__(self, client: redis.asyncio.Redis, ledger: ClientLedger) -> None:
        # redis-py types replies as "bytes or str"; this client returns bytes.
        self._client: Any = client
        self._ledger = ledger

    async def page(self, tenant: str, query: JobQuery) -> JobPage:
        """A part of a tenant's list.

        Raises:
            RequestUnknown: no job of this tenant is called `query.after`.
            StoreUnavailable: Redis is away.
        """
        start = await self._start(tenant, query)
        found: list[RequestStatus] = []
        while len(found) <= query.limit:
            ids = await self._slice(tenant, start, is_ascending=query.ascending)
            if not ids:
                break
            statuses = await self._ledger.statuses(ids)
            gone = [job_id for job_id, status in zip(ids, statuses, strict=True) if status is None]
            if gone:
                with store_errors():
                    await self._client.zrem(jobs_key(tenant), *gone)
            start += len(ids) - len(gone)
            found += [status for status in statuses if status and query.is_wanted(status)]
        return JobPage(found[: query.limit], len(found) > query.limit)

    async def _start(self, tenant: str, query: JobQuery) -> int:
        if query.after is None:
            return 0
        ask = self._client.zrank if query.ascending else self._client.zrevrank
        with store_errors():
            rank = await ask(jobs_key(tenant), query.after)
        if rank is None:
            raise RequestUnknown(query.after)
        return int(rank) + 1

    async def _slice(self, tenant: str, start: int, *, is_ascending: bool) -> list[str]:
        with store_errors():
            ids = await self._client.zrange(
                jobs_key(tenant), start, start + SLICE - 1, desc=not is_ascending
            )
        return [job_id.decode() for job_id in ids]
