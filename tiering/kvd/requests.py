"""What a holder or an operator may ask kvd for: arguments checked, then handed to the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Protocol

from tiering import frames
from tiering.errors import ProtocolViolation
from tiering.kvd.node_cache import Acquired, NodeCache, ReserveWish
from tiering.kvd.peer_library import PeerLibrary
from tiering.kvd.peers import MAX_PEERS, Peers
from tiering.kvd.protocol import Op, Status
from tiering.tier import Tier
from tiering.transports.block_transport import Compatibility

OPERATOR_OPS = frozenset({Op.FIND, Op.DISCARD, Op.STATS, Op.PURGE, Op.LIST})

MAX_ADDRESS_CHARS = 300
LONGEST_PULL_S = 30.0

Reply = tuple[Status, object]


class Host(Protocol):
    """The server as a connection's requests see it."""

    cache: NodeCache
    peers: Peers
    library: PeerLibrary

    @property
    def num_holders(self) -> int:
        """Connections that have shaken hands as holders."""
        ...


class Requests:
    """The requests of one connection; each handler takes the arguments of its `Op`.

    A handler that must wait answers with a coroutine. `namespace` is what peers must have in
    common with the holder.

    Raises (all handlers):
        ProtocolViolation: the arguments are not those of the operation.
    """

    def __init__(self, host: Host, holder_id: int) -> None:
        self.namespace = ""
        self._host = host
        self._cache = host.cache
        self._holder_id = holder_id
        self._handlers: dict[
            int, Callable[[list[object]], Reply | Coroutine[None, None, Reply]]
        ] = {
            Op.FIND: self._find,
            Op.LOCATE: self._locate,
            Op.ACQUIRE: self._acquire,
            Op.RELEASE: self._release,
            Op.RESERVE: self._reserve,
            Op.COMMIT: self._commit,
            Op.ABORT: self._abort,
            Op.DISCARD: self._discard,
            Op.SUSPECT: self._suspect,
            Op.STATS: self._stats,
            Op.PURGE: self._purge,
            Op.LIST: self._list,
            Op.SURVEY: self._survey,
            Op.PULL: self._pull,
        }

    def answer(self, op: int, arguments: list[object]) -> Reply | Coroutine[None, None, Reply]:
        """The reply to one request, or the coroutine that will give it."""
        handler = self._handlers.get(op)
        if handler is None:
            raise ProtocolViolation(f"operation {op} out of turn")
        return handler(arguments)

    def _find(self, arguments: list[object]) -> Reply:
        (keys,) = frames.as_arguments(arguments, 1)
        return Status.OK, self._cache.find(frames.as_keys(keys))

    def _locate(self, arguments: list[object]) -> Reply:
        (keys,) = frames.as_arguments(arguments, 1)
        return Status.OK, list(self._cache.locate(frames.as_keys(keys)))

    def _acquire(self, arguments: list[object]) -> Reply | Coroutine[None, None, Reply]:
        raw_keys, raw_ttl_s, raw_wait_s = frames.as_arguments(arguments, 3)
        keys, ttl_s = frames.as_keys(raw_keys), frames.as_seconds(raw_ttl_s)
        wait_s = frames.as_seconds(raw_wait_s)
        if self._cache.needs_promotion(keys):
            return self._acquire_later(keys, ttl_s, wait_s)
        acquired = self._cache.acquire(keys, self._holder_id, ttl_s, frozenset())
        return Status.OK, _pack_lease(acquired)

    async def _acquire_later(self, keys: list[bytes], ttl_s: float, wait_s: float) -> Reply:
        acquired = await self._cache.promote_and_acquire(keys, self._holder_id, ttl_s, wait_s)
        return Status.OK, _pack_lease(acquired)

    def _release(self, arguments: list[object]) -> Reply:
        complete = frames.with_defaults(arguments, None, 0, 0)
        lease_id, num_bytes, raw_load_s = frames.as_arguments(complete, 3)
        self._cache.release(frames.as_int(lease_id), self._holder_id)
        load_s = frames.as_seconds(raw_load_s)
        self._cache.count_moves(is_load=True, num_bytes=frames.as_int(num_bytes), seconds=load_s)
        return Status.OK, None

    def _reserve(self, arguments: list[object]) -> Reply | Coroutine[None, None, Reply]:
        complete = frames.with_defaults(arguments, None, None, None, b"")
        raw_keys, raw_ttl_s, raw_lifetime_s, owner = frames.as_arguments(complete, 4)
        keys, ttl_s = frames.as_keys(raw_keys), frames.as_seconds(raw_ttl_s)
        lifetime_s = None if raw_lifetime_s is None else frames.as_seconds(raw_lifetime_s)
        wish = ReserveWish(keys, ttl_s, lifetime_s, frames.as_owner(owner))
        num_blocks = self._cache.count_missing(keys)
        if not self._cache.write_back.make_room(num_blocks):
            return self._reserve_later(wish, num_blocks)
        return self._reserve_now(wish)

    async def _reserve_later(self, wish: ReserveWish, num_blocks: int) -> Reply:
        deadline_s = asyncio.get_running_loop().time() + wish.ttl_s
        await self._cache.write_back.wait_for_room(num_blocks, deadline_s)
        return self._reserve_now(wish)

    def _reserve_now(self, wish: ReserveWish) -> Reply:
        blocks = self._cache.reserve(wish, self._holder_id)
        return Status.OK, [None if b is None else [b.slot, b.generation] for b in blocks]

    def _commit(self, arguments: list[object]) -> Reply:
        raw_rows, raw_store_s = frames.as_arguments(frames.with_defaults(arguments, None, 0), 2)
        rows, store_s = frames.as_rows(raw_rows, 5), frames.as_seconds(raw_store_s)
        num_bytes = sum(row[3] for row in rows)
        self._cache.count_moves(is_load=False, num_bytes=num_bytes, seconds=store_s)
        return Status.OK, self._cache.commit(rows, self._holder_id)

    def _abort(self, arguments: list[object]) -> Reply:
        (rows,) = frames.as_arguments(arguments, 1)
        self._cache.abort(frames.as_rows(rows, 2), self._holder_id)
        return Status.OK, None

    def _discard(self, arguments: list[object]) -> Reply:
        (keys,) = frames.as_arguments(arguments, 1)
        self._cache.discard(frames.as_keys(keys))
        return Status.OK, None

    def _suspect(self, arguments: list[object]) -> Reply:
        key, generation = frames.as_arguments(arguments, 2)
        self._cache.suspect(frames.as_keys([key])[0], frames.as_int(generation))
        return Status.OK, None

    def _purge(self, arguments: list[object]) -> Reply:
        (owner,) = frames.as_arguments(arguments, 1)
        return Status.OK, self._cache.purge(frames.as_owner(owner))

    def _stats(self, arguments: list[object]) -> Reply:
        frames.as_arguments(arguments, 0)
        host = self._host
        stats = self._cache.stats(host.num_holders)
        complete = replace(stats, peers=host.peers.stats(), lending=host.library.stats())
        return Status.OK, complete.to_map()

    def _list(self, arguments: list[object]) -> Reply:
        is_nvme, raw_start, owner = frames.as_arguments(arguments, 3)
        tier = Tier.NVME if frames.as_int(is_nvme, 1) else Tier.DRAM
        start = frames.as_int(raw_start)
        next_start, blocks = self._cache.listed(tier, start, frames.as_owner(owner))
        rows = [
            [b.key, b.owner, b.stamp.num_tokens, b.stamp.num_bytes, b.num_leases, b.num_uses]
            for b in blocks
            if b.stamp is not None
        ]
        return Status.OK, [next_start, rows]

    async def _survey(self, arguments: list[object]) -> Reply:
        keys, peers, wait_s = _peer_arguments(arguments)
        wanted = Compatibility(self._cache.block_bytes, self.namespace)
        answers = await self._host.peers.survey(keys, peers, wanted, wait_s)
        return Status.OK, [list(answer) for answer in answers]

    async def _pull(self, arguments: list[object]) -> Reply:
        keys, peers, wait_s = _peer_arguments(arguments)
        wanted = Compatibility(self._cache.block_bytes, self.namespace)
        pulled = await self._host.peers.pull(keys, peers, wanted, wait_s)
        numbers = [pulled.num_found, pulled.num_blocks, pulled.num_bytes]
        return Status.OK, [*numbers, pulled.seconds, pulled.peer]


def _peer_arguments(arguments: list[object]) -> tuple[list[bytes], list[str], float]:
    keys, raw_peers, wait_s = frames.as_arguments(arguments, 3)
    if not isinstance(raw_peers, list) or len(raw_peers) > MAX_PEERS:
        raise ProtocolViolation(f"no list of at most {MAX_PEERS} peers")
    peers = [str(peer)[:MAX_ADDRESS_CHARS] for peer in raw_peers]
    return frames.as_keys(keys), peers, frames.as_seconds(wait_s, LONGEST_PULL_S)


def _pack_lease(acquired: Acquired) -> list[object]:
    rows = []
    for block, tier in zip(acquired.blocks, acquired.tiers, strict=True):
        if block.stamp is not None:
            stamp, is_nvme = block.stamp, int(tier is Tier.NVME)
            numbers = [stamp.num_tokens, stamp.num_bytes]
            rows.append([block.slot, block.generation, stamp.checksum, is_nvme, *numbers])
    return [acquired.lease_id, rows]
