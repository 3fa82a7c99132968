"""Blocks by NIXL: asked for over the same TCP connection as ever, written by the peer into our memory.

They land in a buffer of the transport's own and are copied from there into the room, verified on the
way: whatever a peer that was given up still writes, it never lies in a slot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from tiering import frames
from tiering.errors import PeerCorrupt, PeerIncompatible, PeerUnavailable, ProtocolViolation
from tiering.stores.block_store import ByteArray, copy_with_checksum, padded
from tiering.stores.slab_file import aligned_array
from tiering.transports.block_transport import Compatibility, Library, OfferedBlock, Room
from tiering.transports.nixl_agent import NixlAgent
from tiering.transports.peer_socket import PeerSocket
from tiering.transports.tcp_transport import DEFAULT_STALL_S, TcpTransport
from tiering.transports.tcp_wire import PeerOp, lend_for_pull, pack_offer, parse_offer

BUFFER_BYTES = 8 << 20  # one round: at 50 Mbit/s it takes less than the longest silence
_MAX_BLOCK_BYTES = 1 << 30


class NixlTransport(TcpTransport):
    """See the port `BlockTransport`. One pull at a time; the others wait for it."""

    def __init__(self, agent: NixlAgent, secret: bytes, stall_s: float = DEFAULT_STALL_S) -> None:
        super().__init__(secret, stall_s)
        self._agent = agent
        self._turn = threading.Lock()
        self._buffer: ByteArray = aligned_array(BUFFER_BYTES)
        self._metadata = self._agent.register(self._buffer)

    def pull(
        self,
        peer: str,
        wanted: Compatibility,
        keys: Sequence[bytes],
        room: Room,
        deadline_s: float,
    ) -> int:
        """See the port."""
        if not self._turn.acquire(timeout=max(deadline_s - time.monotonic(), 0.0)):
            raise PeerUnavailable(peer, "other pulls took all the time")
        try:
            with self.greeted(peer, wanted, deadline_s) as connection:
                slots = self._slots_of(wanted.block_bytes)
                geometry = (slots.ctypes.data, slots.strides[0], len(slots))
                wait_s = max(self.wait_share(deadline_s), 0.0)
                asked = list(keys[: frames.MAX_KEYS])
                connection.send(PeerOp.PUSH, asked, wait_s, self._metadata, *geometry)
                connection.allow_silence(wait_s)
                (rows,) = frames.as_arguments(connection.receive(), 1)
                if isinstance(rows, str):
                    raise PeerIncompatible(peer, "transport nixl", rows[:100])
                offered = parse_offer(rows, keys, wanted.block_bytes)
                return _receive(connection, peer, slots, offered, room)
        finally:
            self._turn.release()

    def _slots_of(self, block_bytes: int) -> ByteArray:
        """The buffer as slots, (num_slots, slot_bytes); a larger one for larger blocks."""
        slot_bytes = padded(block_bytes)
        if slot_bytes > self._buffer.nbytes:
            larger = aligned_array(slot_bytes)
            self._metadata = self._agent.register(larger)
            self._buffer = larger
        num_slots = self._buffer.nbytes // slot_bytes
        slots: ByteArray = self._buffer[: num_slots * slot_bytes].reshape(num_slots, slot_bytes)
        return slots


def _receive(
    connection: PeerSocket,
    peer: str,
    slots: ByteArray,
    offered: Sequence[OfferedBlock],
    room: Room,
) -> int:
    """Have the offered blocks written round by round; returns the bytes that came."""
    targets = room.take(offered) if offered else ()
    connection.send(len(targets))
    num_bytes = 0
    for start in range(0, len(targets), len(slots)):
        if start:
            connection.send(start)
        (num_written,) = frames.as_arguments(connection.receive(), 1)
        for index in range(start, start + frames.as_int(num_written, len(slots))):
            stamp = offered[index].stamp
            source = slots[index - start, : stamp.num_bytes]
            if copy_with_checksum(source, targets[index][: stamp.num_bytes]) != stamp.checksum:
                raise PeerCorrupt(peer, index, "payload checksum")
            room.publish(index)
            num_bytes += stamp.num_bytes
        if num_written != min(len(slots), len(targets) - start):
            raise PeerUnavailable(peer, "it has less than it promised")
    return num_bytes


class NixlPusher:
    """The lending side; see the port `BlockPusher`. `agent` may be that of a `NixlTransport`."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent

    def push(
        self, peer: PeerSocket, wanted: Compatibility, library: Library, arguments: list[object]
    ) -> None:
        """Write blocks into the asker's slots, a round each time it says so."""
        raw_keys, raw_wait_s, metadata, raw_base, raw_stride, raw_slots = frames.as_arguments(
            arguments, 6
        )
        base, num_slots = frames.as_int(raw_base), frames.as_int(raw_slots)
        stride = frames.as_int(raw_stride, _MAX_BLOCK_BYTES)
        if not isinstance(metadata, bytes) or not num_slots or stride < wanted.block_bytes:
            raise ProtocolViolation("no room to write to")
        keys, wait_s = frames.as_keys(raw_keys), frames.as_seconds(raw_wait_s)
        with lend_for_pull(peer, wanted, library, keys, wait_s) as loan:
            peer.send(pack_offer(loan.offered))
            (raw_taken,) = frames.as_arguments(peer.receive(), 1)
            num_taken = frames.as_int(raw_taken, len(loan.offered))
            for start in range(0, num_taken, num_slots):
                if start and peer.receive() != [start]:
                    raise ProtocolViolation("another round than the next")
                parts = loan.payloads[start : min(start + num_slots, num_taken)]
                addresses = [base + number * stride for number in range(len(parts))]
                self._agent.write(metadata, parts, addresses, peer.check_listens)
                peer.send(len(parts))
