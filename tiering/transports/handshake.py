"""Two cache daemons make sure of each other: the shared secret, then the blocks they serve.

    server -> client   version, nonce
    client -> server   version, nonce, mac, block_bytes, namespace
    server -> client   welcome and mac, or why not

The secret itself never travels: each side proves it by an HMAC over both nonces and over what the
client asked for. Blocks are not encrypted: the network between nodes is a private one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from enum import IntEnum

from tiering import frames
from tiering.errors import PeerIncompatible, PeerUnavailable, ProtocolViolation
from tiering.transports.block_transport import WIRE_VERSION, Compatibility, Library
from tiering.transports.peer_socket import PeerSocket

_NONCE_BYTES = 32
_MAX_GREETING_BYTES = 2048  # before the secret is proved, nobody makes us hold more
_MAX_NAMESPACE_CHARS = 200

# A greeting of somebody who moves no blocks: it measures the link.
NO_BLOCKS = Compatibility(0, "")


class Verdict(IntEnum):
    """First element of the server's answer."""

    WELCOME = 0
    INCOMPATIBLE = 1  # then what it serves
    UNKNOWN_SECRET = 2
    OTHER_VERSION = 3


def greet(peer: PeerSocket, address: str, secret: bytes, wanted: Compatibility) -> None:
    """The client's part.

    Raises:
        PeerIncompatible: the server serves other blocks, has another secret, or another version.
        PeerUnavailable: it cannot prove the secret.
        ProtocolViolation, OSError: as `PeerSocket`.
    """
    version, raw_nonce = frames.as_arguments(peer.receive(_MAX_GREETING_BYTES), 2)
    server_nonce = _as_nonce(raw_nonce)
    if version != WIRE_VERSION:
        raise PeerIncompatible(address, f"version {WIRE_VERSION}", f"version {version!r:.20}")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    mac = _mac(secret, b"client", server_nonce + nonce, wanted)
    peer.send(WIRE_VERSION, nonce, mac, wanted.block_bytes, wanted.namespace)
    match peer.receive(_MAX_GREETING_BYTES):
        case [Verdict.WELCOME, bytes() as proof]:
            if not hmac.compare_digest(
                proof, _mac(secret, b"server", nonce + server_nonce, wanted)
            ):
                raise PeerUnavailable(address, "it does not know the secret")
        case [Verdict.INCOMPATIBLE, str() as served]:
            raise PeerIncompatible(address, str(wanted), served)
        case [Verdict.UNKNOWN_SECRET, *_]:
            raise PeerIncompatible(address, "our secret", "another secret")
        case [Verdict.OTHER_VERSION, *_]:
            raise PeerIncompatible(address, f"version {WIRE_VERSION}", "another version")
        case _:
            raise ProtocolViolation("no answer to a greeting")


def receive_greeting(peer: PeerSocket, secret: bytes, library: Library) -> Compatibility | None:
    """The server's part: what the client may have, None when it was refused.

    Raises:
        ProtocolViolation, OSError: as `PeerSocket`.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    peer.send(WIRE_VERSION, nonce)
    version, *rest = peer.receive(_MAX_GREETING_BYTES)
    if version != WIRE_VERSION:
        peer.send(Verdict.OTHER_VERSION)
        return None
    raw_nonce, proof, block_bytes, namespace = frames.as_arguments(rest, 4)
    if not isinstance(proof, bytes) or not isinstance(namespace, str):
        raise ProtocolViolation("no greeting")
    wanted = Compatibility(frames.as_int(block_bytes), namespace[:_MAX_NAMESPACE_CHARS])
    client_nonce = _as_nonce(raw_nonce)
    if not hmac.compare_digest(proof, _mac(secret, b"client", nonce + client_nonce, wanted)):
        peer.send(Verdict.UNKNOWN_SECRET)
        return None
    served = library.refusal(wanted) if wanted != NO_BLOCKS else ""
    if served:
        peer.send(Verdict.INCOMPATIBLE, served)
        return None
    peer.send(Verdict.WELCOME, _mac(secret, b"server", client_nonce + nonce, wanted))
    return wanted


def _mac(secret: bytes, side: bytes, nonces: bytes, wanted: Compatibility) -> bytes:
    said = b"pointsman.peer." + side + nonces + wanted.digest.encode()
    return hmac.new(secret, said, hashlib.sha256).digest()


def _as_nonce(value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) != _NONCE_BYTES:
        raise ProtocolViolation("no nonce")
    return value
