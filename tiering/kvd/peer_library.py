"""What this node lends to its peers: the transport's threads ask, the event loop answers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from tiering import frames
from tiering.kvd.node_cache import Acquired, NodeCache
from tiering.kvd.stats import LendingStats
from tiering.transports.block_transport import Compatibility, Loan, OfferedBlock

T = TypeVar("T")

PEERS = -1  # holder id of all loans to peers
LOAN_TTL_S = 35.0  # longer than a connection of a peer may live
_ANSWER_LIMIT_S = 5.0
_MAX_NAMESPACES = 16


class PeerLibrary:
    """See `Library`. Serves the namespaces that this node's holders have named."""

    def __init__(self, cache: NodeCache) -> None:
        self._cache = cache
        self._loop = asyncio.get_running_loop()
        self._namespaces: OrderedDict[str, None] = OrderedDict()
        self._num_lent_blocks = 0
        self._num_lent_bytes = 0
        self.address = ""  # where peers find it; empty while it lends nothing

    def add_namespace(self, namespace: str) -> None:
        """A holder greeted with this name."""
        self._namespaces[namespace] = None
        self._namespaces.move_to_end(namespace)
        if len(self._namespaces) > _MAX_NAMESPACES:
            self._namespaces.popitem(last=False)

    def refusal(self, wanted: Compatibility) -> str:
        """See the port."""
        block_bytes = self._cache.block_bytes
        if wanted.block_bytes == block_bytes and wanted.namespace in self._namespaces:
            return ""
        served = [str(Compatibility(block_bytes, name)) for name in list(self._namespaces)]
        return " or ".join(served)[:1000] or "nothing yet: no worker has come to this node"

    def find(self, keys: Sequence[bytes]) -> int:
        """See the port."""

        async def find() -> int:
            return self._cache.find(keys)

        return self._answer(find(), _ANSWER_LIMIT_S)

    def stats(self) -> LendingStats:
        """What peers got from here."""
        return LendingStats(self.address, self._num_lent_blocks, self._num_lent_bytes)

    @contextmanager
    def lend(self, keys: Sequence[bytes], max_blocks: int, wait_s: float) -> Iterator[Loan]:
        """See the port."""
        asked = keys[: min(max_blocks, frames.MAX_KEYS)]
        loan = self._cache.promote_and_acquire(asked, PEERS, LOAN_TTL_S, wait_s)
        acquired = self._answer(loan, wait_s + _ANSWER_LIMIT_S)
        try:
            yield self._as_loan(acquired)
        finally:
            with suppress(RuntimeError):  # the loop has ended, and all leases with it
                self._loop.call_soon_threadsafe(self._cache.release, acquired.lease_id, PEERS)

    def _as_loan(self, acquired: Acquired) -> Loan:
        offered, payloads = [], []
        for block in acquired.blocks:
            if block.stamp is None:
                break
            offered.append(OfferedBlock(block.stamp, block.lifetime_s))
            payloads.append(self._cache.arrivals.view(block)[: block.stamp.num_bytes])
        self._num_lent_blocks += len(offered)
        self._num_lent_bytes += sum(payload.nbytes for payload in payloads)
        return Loan(offered, payloads)

    def _answer(self, question: Coroutine[None, None, T], limit_s: float) -> T:
        """Raises TimeoutError or ConnectionError when the loop does not answer."""
        try:
            future = asyncio.run_coroutine_threadsafe(question, self._loop)
        except RuntimeError as error:
            question.close()
            raise ConnectionError("this node is stopping") from error
        try:
            return future.result(limit_s)
        finally:
            future.cancel()
