"""What kvd counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from tiering.block_directory import BlockDirectory
from tiering.errors import ProtocolViolation


@dataclass(slots=True)
class TierCounters:
    """Running counts of one tier since kvd started."""

    num_hits: int = 0
    num_misses: int = 0
    num_checksum_failures: int = 0
    num_stores_dropped: int = 0
    num_io_errors: int = 0
    evictions: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier. Hits and misses are blocks asked for by `acquire`; a run ends at its first miss.

    `evictions` by reason: "written_back", "clean" (NVMe had it), "dropped" (bytes are gone),
    "expired" (lifetime), "discarded", "capacity" (NVMe full). `health`: "on", "read_only", "off".
    """

    num_slots: int
    slot_bytes: int
    used_bytes: int
    slots_by_state: dict[str, int]
    num_quarantined: int
    num_leases: int
    num_hits: int
    num_misses: int
    num_checksum_failures: int
    num_stores_dropped: int
    num_io_errors: int
    evictions: dict[str, int]
    health: str


def snapshot(
    directory: BlockDirectory, slot_bytes: int, counters: TierCounters, health: str
) -> TierStats:
    """The tier as it stands."""
    states = {state.name.lower(): num for state, num in directory.count_states().items()}
    return TierStats(
        num_slots=directory.num_slots,
        slot_bytes=slot_bytes,
        used_bytes=directory.num_used * slot_bytes,
        slots_by_state=states,
        num_quarantined=directory.num_quarantined,
        num_leases=directory.num_leases,
        health=health,
        num_hits=counters.num_hits,
        num_misses=counters.num_misses,
        num_checksum_failures=counters.num_checksum_failures,
        num_stores_dropped=counters.num_stores_dropped,
        num_io_errors=counters.num_io_errors,
        evictions=dict(counters.evictions),
    )


@dataclass(frozen=True, slots=True)
class KvdStats:
    """The daemon. `tiers` by name ("dram", "nvme"); `block_bytes` 0 before the first holder."""

    block_bytes: int
    num_holders: int
    num_leases: int
    num_reservations: int
    num_commits_refused: int
    tiers: dict[str, TierStats]

    def to_map(self) -> dict[str, Any]:
        """Plain values for the wire."""
        return asdict(self)

    @classmethod
    def from_map(cls, value: object) -> Self:
        """Back from the wire.

        Raises:
            ProtocolViolation: it is something else.
        """
        try:
            return TypeAdapter(cls).validate_python(value)
        except ValidationError as error:
            raise ProtocolViolation("no kvd statistics") from error
