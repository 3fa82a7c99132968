"""The head of a context that the HBM pool does not hold: blocks that stay in the node's DRAM."""

from __future__ import annotations

from collections.abc import Sequence

from tiering.kvd.client import KvdClient
from tiering.lease import BlockLease, LeasedBlock

_LEASE_S = 86_400.0  # as long as the connection: kvd gives no longer ones


class ColdBlocks:
    """Blocks of one sequence that steps read where they lie, under leases of one connection.

    The mover's thread adds to them and ends the leases. Any thread may ask whether they `are_kept`:
    a step that read them did so rightly if they are after it.
    """

    def __init__(self) -> None:
        self.slots: list[int] = []
        self._client: KvdClient | None = None
        self._leases: list[BlockLease] = []

    @property
    def are_kept(self) -> bool:
        """All of them were in their slots up to now."""
        client = self._client
        return client is None or client.keeps(self._leases[0])  # the first to run out

    def extend(self, client: KvdClient, keys: Sequence[bytes], wait_s: float) -> list[LeasedBlock]:
        """Lease the head run of `keys` that kvd has and that is as it was stored; what came of it.

        Nothing comes where the blocks before are another connection's, and thus lost.

        Raises:
            KvdUnavailable: as all calls of a client.
        """
        if self._client is not None and self._client is not client:
            return []
        lease = client.acquire(keys, ttl_s=_LEASE_S, wait_s=wait_s)
        num_asked = len(lease.blocks)
        num_good = next((n for n in range(num_asked) if not client.verify(lease, n)), num_asked)
        if num_good < num_asked:
            client.release(lease)
            return self.extend(client, keys[:num_good], wait_s)
        if lease.blocks:
            self._leases.append(lease)
            self._client = client
            self.slots += [block.slot for block in lease.blocks]
        return lease.blocks

    def let_go(self, client: KvdClient) -> None:
        """End the leases, if they are this connection's; others ended with theirs."""
        if client is self._client:
            for lease in self._leases:
                client.release(lease)
