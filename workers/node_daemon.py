"""The node's cache daemon as one worker reaches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.ledger.node_board import NodeBoard
from pipeline.scheduling.transfer_cost import LoadPolicy
from tiering.block_layout import BlockLayout
from tiering.kvd.client import KvdClient
from tiering.kvd.operator import KvdOperator
from workers.kv_jobs import KvMover
from workers.kv_mover import KvdMover
from workers.node_reporter import NodeReporter
from workers.pulling_mover import PullingMover

# A cache daemon that is frozen must not hold a prompt for longer than computing it would.
KVD_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class NodeDaemon:
    """Makes what talks to it. `namespace` is the digest of model and layout."""

    socket_path: Path
    worker: str
    layout: BlockLayout
    namespace: str

    def client(self) -> KvdClient:
        """An unconnected client."""
        return KvdClient(
            self.socket_path,
            self.layout.block_bytes,
            self.worker,
            timeout_s=KVD_TIMEOUT_S,
            namespace=f"{self.layout.describe()}.{self.namespace[:16]}",
        )

    def mover(self, max_pending_blocks: int, policy: LoadPolicy, long_share: float) -> KvMover:
        """Moves blocks between HBM and the node's tiers, and from other nodes to those."""
        mover = KvdMover(
            self.client,
            max_pending_blocks=max_pending_blocks,
            policy=policy,
            long_share=long_share,
        )
        return PullingMover(mover, self.client, policy)

    def reporter(self, node: str, board: NodeBoard, on_purge: Callable[[], object]) -> NodeReporter:
        """Tells the pipeline how the daemon is."""
        operator = KvdOperator(self.socket_path, self.worker, timeout_s=KVD_TIMEOUT_S)
        return NodeReporter(node, operator, board, on_purge)
