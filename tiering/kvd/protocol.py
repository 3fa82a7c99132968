"""What kvd and its holders say to each other over the Unix stream socket.

A holder sends one request `[op, *arguments]` at a time and reads one reply `[status, value]`, both
in frames (`tiering.frames`). The reply to HELLO carries the DRAM slab's descriptor (SCM_RIGHTS).
Block bytes never travel: they lie in the slab.
"""

from __future__ import annotations

from enum import IntEnum

VERSION = 2
MAX_HOLDER_CHARS = 200
MAX_NAMESPACE_CHARS = 200


class Op(IntEnum):
    """First element of a request, with the arguments that follow and the value of the reply."""

    # version, holder, block_bytes [, namespace] -> [session, slot_bytes, slab_bytes] + descriptor;
    # block_bytes 0 greets as an operator: no descriptor, and only questions, DISCARD and PURGE
    HELLO = 1
    FIND = 2  # keys -> num_blocks
    ACQUIRE = 3  # keys, ttl_s, wait_s -> [lease_id, [[slot, generation, checksum, is_nvme, num_tokens, num_bytes]]]
    RELEASE = 4  # lease_id [, bytes loaded, seconds] -> None
    RESERVE = 5  # keys, ttl_s, lifetime_s | None [, owner] -> [[slot, generation] | None]
    COMMIT = 6  # [[slot, generation, num_tokens, num_bytes, checksum]] [, seconds] -> num_published
    ABORT = 7  # [[slot, generation]] -> None
    DISCARD = 8  # keys -> None
    SUSPECT = 9  # key, generation -> None
    STATS = 10  # -> map
    PURGE = 11  # owner -> num_blocks
    # is_nvme, start, owner -> [next start | 0, [[key, owner, num_tokens, num_bytes, num_leases, num_uses]]]
    LIST = 12
    SURVEY = 13  # keys, [peer], wait_s -> [[num_blocks, seconds]]
    PULL = 14  # keys, [peer], wait_s -> [num_found, num_blocks, num_bytes, seconds, peer]
    LOCATE = 15  # keys -> [num_blocks in DRAM, num_blocks]


class Status(IntEnum):
    """First element of a reply."""

    OK = 0
    LAYOUT_MISMATCH = 1  # value: [wanted_bytes, served_bytes]
    REFUSED = 2  # value: a sentence
    LAYOUT_NOT_PACKED = 3  # value: [wanted, served], layouts in words
