"""The tiers a block may lie in, and the states of a slot."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class Tier(StrEnum):
    """Where a block lies, fastest first."""

    HBM = "hbm"
    DRAM = "dram"
    NVME = "nvme"


class SlotState(IntEnum):
    """What is happening in a slot; only READY and EVICTING slots may be read.

    FREE -> RESERVED (a holder writes into it) -> READY; FREE -> WRITING (kvd demotes into it)
    -> READY; FREE -> LOADING (kvd promotes into it) -> READY; READY -> EVICTING (its bytes are
    being written back; a lease rescues it) -> FREE. RESERVED -> RESTING (its time is over, but its
    holder may be in the middle of writing) -> FREE, when the holder is gone or is heard of again.
    """

    FREE = 0
    RESERVED = 1
    WRITING = 2
    READY = 3
    LOADING = 4
    EVICTING = 5
    RESTING = 6
