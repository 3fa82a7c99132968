"""Errors of the tiering room.

TieringError
├── KvdUnavailable     the daemon is away, slow or broken off: treat as a miss, `connect()` later
├── LayoutMismatch     this node's kvd serves another block size: use another node or another kvd
├── LayoutNotPacked    kvd packs the blocks of another model: use another kvd, or no compression
├── ProtocolViolation  a frame that no kvd peer sends: the connection is closed
├── SlotCorrupt        a slot does not hold what the index says: treat as a miss, quarantine it
├── SlotMisuse         book-keeping broken (double free, unknown slot): a bug, report it
├── PeerUnavailable    another node's kvd is away, late or broke off: compute the blocks instead
├── PeerIncompatible   it serves other blocks: run the same model, layout and secret on both nodes
├── PeerCorrupt        what it sent is not what it promised: compute the blocks instead
├── TransportMissing   a transport's library is absent: install the extra, or choose another
└── KvdAlreadyRunning  another kvd answers on this socket: stop it or choose another path
"""

from __future__ import annotations


class TieringError(Exception):
    """Root of the tree."""


class KvdUnavailable(TieringError):
    """The cache daemon cannot be reached, did not answer in time, or broke the connection off."""

    def __init__(self, socket_path: str, reason: str) -> None:
        super().__init__(socket_path, reason)
        self.socket_path = socket_path
        self.reason = reason

    def __str__(self) -> str:
        return f"kvd at {self.socket_path} is unavailable: {self.reason}"


class LayoutMismatch(TieringError):
    """A holder asked for another block size than the one that kvd's slabs are laid out for."""

    def __init__(self, wanted_bytes: int, served_bytes: int) -> None:
        super().__init__(wanted_bytes, served_bytes)
        self.wanted_bytes = wanted_bytes
        self.served_bytes = served_bytes

    def __str__(self) -> str:
        return (
            f"this holder's blocks have {self.wanted_bytes} bytes, "
            f"kvd serves blocks of {self.served_bytes} bytes"
        )


class LayoutNotPacked(TieringError):
    """kvd compresses, and by the layout of other blocks than this holder's."""

    def __init__(self, wanted: str, served: str) -> None:
        super().__init__(wanted, served)
        self.wanted = wanted
        self.served = served

    def __str__(self) -> str:
        return f"kvd packs blocks of {self.served}, this holder's are {self.wanted}"


class ProtocolViolation(TieringError):
    """A frame is too long, malformed, or out of turn."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"not a kvd frame: {self.reason}"


class SlotCorrupt(TieringError):
    """The bytes of a slot are not those that were stored under its key."""

    def __init__(self, slot: int, reason: str) -> None:
        super().__init__(slot, reason)
        self.slot = slot
        self.reason = reason

    def __str__(self) -> str:
        return f"slot {self.slot} is corrupt: {self.reason}"


class SlotMisuse(TieringError):
    """A slot was freed twice, or handed back by someone who does not hold it."""

    def __init__(self, slot: int, reason: str) -> None:
        super().__init__(slot, reason)
        self.slot = slot
        self.reason = reason

    def __str__(self) -> str:
        return f"slot {self.slot}: {self.reason}"


class KvdAlreadyRunning(TieringError):
    """A living daemon answers on the socket path."""

    def __init__(self, socket_path: str) -> None:
        super().__init__(socket_path)
        self.socket_path = socket_path

    def __str__(self) -> str:
        return f"another kvd answers on {self.socket_path}"


class PeerUnavailable(TieringError):
    """Another node's cache daemon did not do its part."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(peer, reason)
        self.peer = peer
        self.reason = reason

    def __str__(self) -> str:
        return f"peer {self.peer} is unavailable: {self.reason}"


class PeerIncompatible(TieringError):
    """Another node's cache daemon serves blocks that are not interchangeable with ours."""

    def __init__(self, peer: str, wanted: str, served: str) -> None:
        super().__init__(peer, wanted, served)
        self.peer = peer
        self.wanted = wanted
        self.served = served

    def __str__(self) -> str:
        return f"peer {self.peer} is incompatible: {self.wanted} wanted, {self.served} served"


class PeerCorrupt(TieringError):
    """A block came over with other bytes than its stamp says."""

    def __init__(self, peer: str, index: int, reason: str) -> None:
        super().__init__(peer, index, reason)
        self.peer = peer
        self.index = index
        self.reason = reason

    def __str__(self) -> str:
        return f"peer {self.peer} sent a bad block (number {self.index}): {self.reason}"


class TransportMissing(TieringError):
    """A transport was chosen whose library is not installed or cannot be used on this machine."""

    def __init__(self, transport: str, reason: str) -> None:
        super().__init__(transport, reason)
        self.transport = transport
        self.reason = reason

    def __str__(self) -> str:
        return f"transport {self.transport} cannot be used: {self.reason}"
