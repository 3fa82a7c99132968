"""Blocks from other nodes into this node's DRAM."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice

import structlog

from tiering.block import Block
from tiering.errors import PeerCorrupt, PeerIncompatible, TieringError
from tiering.kvd.arrivals import Arrivals
from tiering.kvd.node_cache import NodeCache
from tiering.kvd.stats import MoveCounter, PeerStats
from tiering.lease import PullResult
from tiering.stores.block_store import ByteArray
from tiering.transports.block_transport import BlockTransport, Compatibility, OfferedBlock

log = structlog.get_logger(__name__)

MAX_PEERS = 8  # of one question
_NUM_PULL_THREADS = 4
_NUM_ASK_THREADS = 2 * MAX_PEERS  # a question takes no time but that of a peer that is silent
_ASK_GRACE_S = 0.2
_MAX_PULLS = 64  # under way and waiting for a thread
_MAX_KNOWN = 1024
_MAX_SHOWN = 64
_FIRST_PAUSE_S = 0.5
_LAST_PAUSE_S = 30.0
_TAKE_LIMIT_S = 5.0


@dataclass(slots=True)
class _Known:
    """What this node remembers of a peer."""

    num_pulls: int = 0
    num_blocks: int = 0
    num_failures: int = 0
    num_corrupt: int = 0
    moves: MoveCounter = field(default_factory=MoveCounter)
    pause_s: float = 0.0
    retry_at_s: float = 0.0


class Peers:
    """Pulls on threads, books on kvd's event loop. A peer that fails is left alone for a while."""

    def __init__(self, cache: NodeCache, transport: BlockTransport) -> None:
        self._cache = cache
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(_NUM_PULL_THREADS, thread_name_prefix="peer-pull")
        self._askers = ThreadPoolExecutor(_NUM_ASK_THREADS, thread_name_prefix="peer-ask")
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._pulls: dict[bytes, _Pull] = {}
        self._running: set[_Pull] = set()

    def stats(self) -> dict[str, PeerStats]:
        """What came from whom, for the peers asked last."""
        now_s = time.monotonic()
        return {
            peer: PeerStats(
                num_pulls=known.num_pulls,
                num_blocks=known.num_blocks,
                num_failures=known.num_failures,
                num_corrupt=known.num_corrupt,
                is_paused=now_s < known.retry_at_s,
                moves=known.moves.stats(),
            )
            for peer, known in islice(reversed(self._known.items()), _MAX_SHOWN)
        }

    async def survey(
        self, keys: Sequence[bytes], peers: Sequence[str], wanted: Compatibility, wait_s: float
    ) -> list[tuple[int, float]]:
        """Length of the head run at each peer, and the seconds that its answer took; 0: no answer."""
        deadline_s = time.monotonic() + wait_s
        asked = peers[:MAX_PEERS]
        answers = (self._ask(peer, keys, wanted, deadline_s) for peer in asked)
        return list(await asyncio.gather(*answers))

    async def pull(
        self, keys: Sequence[bytes], peers: Sequence[str], wanted: Compatibility, wait_s: float
    ) -> PullResult:
        """Bring what this node lacks of the head run, from the first peer that has some of it.

        Returns by the deadline with what has arrived; a pull under way goes on behind it.
        """
        deadline_s = time.monotonic() + wait_s
        total = PullResult(self._cache.find(keys))
        untried = [peer for peer in peers[:MAX_PEERS] if self._is_usable(peer)]
        while total.num_found < len(keys) and (left_s := deadline_s - time.monotonic()) > 0:
            theirs = self._pulls.get(keys[total.num_found])
            if theirs is not None and not theirs.task.done():
                await asyncio.wait({theirs.task}, timeout=left_s)
                total = replace(total, num_found=self._cache.find(keys))
                continue
            if not untried or len(self._running) >= _MAX_PULLS:
                break
            mine = self._start(untried.pop(0), keys[total.num_found :], wanted, deadline_s)
            await asyncio.wait({mine.task}, timeout=left_s)
            total = mine.result(self._cache.find(keys))
            if total.num_blocks:
                break
        return total

    def close(self) -> None:
        """Start no more pulls; those under way end by their deadlines."""
        for threads in (self._threads, self._askers):
            threads.shutdown(wait=False, cancel_futures=True)

    # one peer

    async def _ask(
        self, peer: str, keys: Sequence[bytes], wanted: Compatibility, deadline_s: float
    ) -> tuple[int, float]:
        if not self._is_usable(peer):
            return 0, 0.0
        began_s = time.monotonic()
        answer = self._loop.run_in_executor(
            self._askers, self._transport.find, peer, wanted, keys, deadline_s
        )
        try:
            # A peer that is late is told by the transport; what stays longer found no thread in time.
            num_blocks = await asyncio.wait_for(answer, deadline_s - began_s + _ASK_GRACE_S)
        except TieringError as error:
            self._note_failure(peer, error)
            return 0, 0.0
        except TimeoutError:
            return 0, 0.0
        self._note_success(peer)
        return num_blocks, time.monotonic() - began_s

    def _start(
        self, peer: str, keys: Sequence[bytes], wanted: Compatibility, deadline_s: float
    ) -> _Pull:
        room = _Room(self._cache.arrivals, self._loop, deadline_s)
        task = asyncio.ensure_future(self._pull_from(peer, keys, wanted, room))
        pull = _Pull(peer, room, task)
        mine = [key for key in keys if key not in self._pulls]
        self._pulls |= dict.fromkeys(mine, pull)
        self._running.add(pull)

        def forget(_: object) -> None:
            self._running.discard(pull)
            for key in mine:
                del self._pulls[key]

        task.add_done_callback(forget)
        return pull

    async def _pull_from(
        self, peer: str, keys: Sequence[bytes], wanted: Compatibility, room: _Room
    ) -> None:
        """Runs until the transport has let go of the slots, however long somebody waits for it."""
        try:
            await self._loop.run_in_executor(
                self._threads, self._transport.pull, peer, wanted, keys, room, room.deadline_s
            )
            self._note_success(peer)
        except TieringError as error:
            self._note_failure(peer, error)
        finally:
            room.abort_rest()
            known = self._peer(peer)
            known.num_pulls += 1
            known.num_blocks += room.num_published
            known.moves.add(room.num_bytes, time.monotonic() - room.began_s)

    def _peer(self, peer: str) -> _Known:
        known = self._known.setdefault(peer, _Known())
        self._known.move_to_end(peer)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return known

    def _is_usable(self, peer: str) -> bool:
        return time.monotonic() >= self._peer(peer).retry_at_s

    def _note_success(self, peer: str) -> None:
        self._peer(peer).pause_s = 0.0

    def _note_failure(self, peer: str, error: TieringError) -> None:
        known = self._peer(peer)
        known.num_failures += 1
        known.num_corrupt += isinstance(error, PeerCorrupt)
        known.pause_s = min(max(2 * known.pause_s, _FIRST_PAUSE_S), _LAST_PAUSE_S)
        if isinstance(error, PeerIncompatible):
            known.pause_s = _LAST_PAUSE_S
        known.retry_at_s = time.monotonic() + known.pause_s
        if known.num_failures.bit_count() == 1:  # the 1st, 2nd, 4th, ...: no flood
            log.warning(
                "peer_failed",
                peer=peer,
                reason=str(error),
                num_failures=known.num_failures,
                retry_in_s=known.pause_s,
            )


@dataclass(slots=True, eq=False)
class _Pull:
    """One pull under way; its task ends when the transport touches the slots no more."""

    peer: str
    room: _Room
    task: asyncio.Task[None]

    def result(self, num_found: int) -> PullResult:
        """What it has brought so far."""
        room = self.room
        took_s = time.monotonic() - room.began_s
        return PullResult(num_found, room.num_published, room.num_bytes, took_s, self.peer)


class _Room:
    """Slots for one pull; `take` and `publish` are called on its thread, all else on the loop."""

    def __init__(
        self, arrivals: Arrivals, loop: asyncio.AbstractEventLoop, deadline_s: float
    ) -> None:
        self._arrivals = arrivals
        self._loop = loop
        self.deadline_s = deadline_s
        self.began_s = time.monotonic()
        self._offered: Sequence[OfferedBlock] = ()
        self._blocks: list[Block] = []
        self.num_published = 0
        self.num_bytes = 0

    def take(self, offered: Sequence[OfferedBlock]) -> Sequence[ByteArray]:
        """See the port."""
        self._offered = offered
        future = asyncio.run_coroutine_threadsafe(self._reserve(), self._loop)
        try:
            return future.result(_TAKE_LIMIT_S)
        finally:
            future.cancel()

    def publish(self, index: int) -> None:
        """See the port."""
        self._loop.call_soon_threadsafe(self._publish, index)

    def abort_rest(self) -> None:
        """The transport touches the slots no more: give back those that hold nothing whole."""
        for block in self._blocks:
            self._arrivals.abort(block)

    async def _reserve(self) -> Sequence[ByteArray]:
        self._blocks = await self._arrivals.reserve(self._offered, self.deadline_s)
        return [self._arrivals.view(block) for block in self._blocks]

    def _publish(self, index: int) -> None:
        stamp = self._offered[index].stamp
        if self._arrivals.publish(self._blocks[index], stamp):
            self.num_published += 1
            self.num_bytes += stamp.num_bytes
