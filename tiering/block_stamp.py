"""What must be known of a block's bytes to trust them."""

from __future__ import annotations

from dataclasses import dataclass

KEY_BYTES = 16
OWNER_BYTES = 8


@dataclass(frozen=True, slots=True)
class BlockStamp:
    """Identity and checksum of the bytes in one slot.

    `key` (16 bytes) says which tokens the block holds; `generation` tells two uses of one slot
    apart; `checksum` is `payload_checksum` of the first `num_bytes` of the slot. It guards the bytes
    and is never an identity. `owner` is the opaque tag (8 bytes, or empty) of the tenant that
    wrote the block; it says whose share of a tier the block counts for, nothing else.
    """

    key: bytes
    generation: int
    num_tokens: int
    num_bytes: int
    checksum: int
    owner: bytes = b""
