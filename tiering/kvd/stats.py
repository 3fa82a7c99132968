"""What kvd counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from tiering.block_directory import BlockDirectory
from tiering.errors import ProtocolViolation
from tiering.tier import SlotState

_OLD_SHARE = 0.8


@dataclass(slots=True)
class MoveCounter:
    """Bytes moved into or out of a tier and the time that took.

    `bytes_per_s` is a running average over moves, younger ones weighing more. Moves of several
    threads at once each count their own time, so the tier as a whole may do more.
    """

    num_bytes: int = 0
    seconds: float = 0.0
    bytes_per_s: float = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count one move."""
        if seconds <= 0 or not num_bytes:
            return
        self.num_bytes += num_bytes
        self.seconds += seconds
        rate = num_bytes / seconds
        share = _OLD_SHARE if self.bytes_per_s else 0.0
        self.bytes_per_s = share * self.bytes_per_s + (1 - share) * rate

    def stats(self) -> MoveStats:
        """The counts now."""
        return MoveStats(self.num_bytes, self.seconds, self.bytes_per_s)


@dataclass(slots=True)
class TierCounters:
    """Running counts of one tier since kvd started."""

    num_hits: int = 0
    num_misses: int = 0
    num_checksum_failures: int = 0
    num_stores_dropped: int = 0
    num_not_admitted: int = 0
    evictions: Counter[str] = field(default_factory=Counter)
    loads: MoveCounter = field(default_factory=MoveCounter)
    stores: MoveCounter = field(default_factory=MoveCounter)


@dataclass(frozen=True, slots=True)
class MoveStats:
    """Bytes moved since kvd started, the time that took, and the present rate."""

    num_bytes: int = 0
    seconds: float = 0.0
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier. Hits and misses are blocks asked for by `acquire`; a run ends at its first miss.

    `evictions` by reason: "written_back", "clean" (NVMe had it), "dropped" (bytes are gone),
    "not_admitted" (NVMe would not have it), "expired" (lifetime or idle time), "discarded",
    "capacity" (NVMe full). `health`: "on", "read_only", "off". `ready_bytes` is what can be read.
    `form`: how blocks are packed (`SlabLayout`).
    `loads` and `stores`: for DRAM the copies that holders reported, for NVMe kvd's disk calls.
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
    ready_bytes: int = 0
    num_not_admitted: int = 0
    is_admission_filtered: bool = False
    loads: MoveStats = MoveStats()
    stores: MoveStats = MoveStats()
    slots_by_owner: dict[str, int] = field(default_factory=dict)
    form: str = ""


def snapshot(
    directory: BlockDirectory,
    slot_bytes: int,
    counters: TierCounters,
    health: str,
    num_io_errors: int = 0,
) -> TierStats:
    """The tier as it stands."""
    states = directory.count_states()
    num_ready = states[SlotState.READY] + states[SlotState.EVICTING]
    return TierStats(
        num_slots=directory.num_slots,
        slot_bytes=slot_bytes,
        used_bytes=directory.num_used * slot_bytes,
        ready_bytes=num_ready * slot_bytes,
        slots_by_state={state.name.lower(): num for state, num in states.items()},
        num_quarantined=directory.num_quarantined,
        num_leases=directory.num_leases,
        health=health,
        num_hits=counters.num_hits,
        num_misses=counters.num_misses,
        num_checksum_failures=counters.num_checksum_failures,
        num_stores_dropped=counters.num_stores_dropped,
        num_not_admitted=counters.num_not_admitted,
        num_io_errors=num_io_errors,
        evictions=dict(counters.evictions),
        loads=counters.loads.stats(),
        stores=counters.stores.stats(),
        slots_by_owner={owner.hex(): num for owner, num in directory.num_owned.items()},
    )


@dataclass(frozen=True, slots=True)
class PeerStats:
    """What came from one peer; `is_paused`: it failed lately and is not asked for a while."""

    num_pulls: int
    num_blocks: int
    num_failures: int
    num_corrupt: int
    is_paused: bool
    moves: MoveStats = MoveStats()


@dataclass(frozen=True, slots=True)
class LendingStats:
    """What peers got from here; `address` is where they ask (host:port), empty for nowhere."""

    address: str = ""
    num_blocks: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KvdStats:
    """The daemon. `tiers` by name ("dram", "nvme"); `block_bytes` 0 before the first holder.

    `num_purges`: after one more, holders forget what they keep for reuse themselves. `peers` by
    address, those asked last.
    """

    block_bytes: int
    num_holders: int
    num_leases: int
    num_reservations: int
    num_commits_refused: int
    tiers: dict[str, TierStats]
    peers: dict[str, PeerStats] = field(default_factory=dict)
    lending: LendingStats = LendingStats()
    num_purges: int = 0

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
