"""How the NVMe tier is run."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiering.block_codec import Compression
from tiering.eviction.evictor import NewEvictor
from tiering.eviction.lru import LruEvictor
from tiering.kvd.disk_health import DiskLimits


@dataclass(frozen=True, slots=True)
class NvmeLimits:
    """Settings of the tier.

    `write_bytes_per_day` None is without limit; `max_writes_per_hit` as in `AdmissionFilter`.
    `compression` packs the blocks of layouts that are known.
    """

    new_evictor: NewEvictor = LruEvictor
    tenant_share: float | None = None
    disk: DiskLimits = field(default_factory=DiskLimits)
    write_bytes_per_day: int | None = None
    max_writes_per_hit: float = 3.0
    compression: Compression = Compression.NONE
