"""Settings of the cache daemon, from the environment (`POINTSMAN_KVD_*`)."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tiering.block_codec import Compression
from tiering.eviction.policies import EvictionPolicy

ENV_PREFIX = "POINTSMAN_KVD_"
_ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 (a look-up)


class KvdSettings(BaseSettings):
    """What one kvd process serves, and where. A tier holds as many blocks as fit its bytes.

    Blocks that were used once are no longer written to NVMe when it is nearly full and takes more than
    `nvme_max_writes_per_hit` writes for each hit, or when more than half of `nvme_write_bytes_per_day`
    is spent; when all is, nothing is written.

    `nvme_compression` packs blocks on their way to NVMe into half of 16 bits or less: what comes back
    from there is near what was stored, not equal, so neither are outputs that read it. DRAM, and with it
    the hand-over between workers, stays exact as long as it has room.

    Other nodes' daemons may pull blocks from `peer_host`:`peer_port` if they know `peer_secret`,
    without which nobody but this machine may be let in. With `peer_transport` "nixl" peers write into
    each other's memory by RDMA, or by whatever else UCX finds.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    socket: Path = Field(description="Unix socket to listen on")
    dram_bytes: int = Field(ge=4096, description="of the memory tier, taken whole at the start")
    nvme_bytes: int = Field(default=0, ge=0, description="of the disk tier; 0: none")
    nvme_path: Path | None = Field(default=None, description="the disk tier's file")
    high_watermark: float = Field(
        default=0.9, gt=0, le=1, description="DRAM fuller than this makes room"
    )
    low_watermark: float = Field(default=0.8, ge=0, lt=1, description="down to this share")
    io_timeout_s: float = Field(
        default=2.0, gt=0, description="a disk call that hangs for longer turns the tier off"
    )
    flush_timeout_s: float = Field(
        default=10.0, ge=0, description="for what is written to NVMe at SIGTERM"
    )
    room_wait_s: float = Field(
        default=0.1, ge=0, description="how long a store waits for room before it is dropped"
    )
    dram_eviction: EvictionPolicy = Field(
        default=EvictionPolicy.ARC, description="what leaves DRAM first"
    )
    nvme_eviction: EvictionPolicy = Field(
        default=EvictionPolicy.LRU, description="what leaves NVMe first"
    )
    idle_ttl_s: float = Field(
        default=600.0,
        gt=0,
        description="with `ttl`: what was not used for so long goes, even where there is room",
    )
    tenant_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="most of a tier's slots before a tenant loses its own blocks first; empty: no shares",
    )
    nvme_retry_s: float = Field(
        default=30.0,
        gt=0,
        description="until a disk that failed is tried again; doubles, up to 16 times",
    )
    nvme_slow_io_s: float = Field(default=0.5, gt=0, description="a call that takes longer is slow")
    nvme_max_writes_per_hit: float = Field(
        default=3.0,
        gt=0,
        description="more than that are wasteful: what was used once is not written then",
    )
    nvme_write_bytes_per_day: int = Field(
        default=0, ge=0, description="to spare the disk; 0: no limit"
    )
    nvme_compression: Compression = Field(
        default=Compression.NONE,
        description="half the bytes on the disk, no longer exact; peers must have it alike",
    )
    peer_host: str = Field(default="127.0.0.1", description="where other nodes may pull blocks")
    peer_port: int | None = Field(
        default=None, ge=0, le=65_535, description="its port; empty: they may not, 0: any"
    )
    peer_advertise: str = Field(
        default="",
        description="`host:port` that they are told, where `peer_host` is no address for them",
    )
    peer_secret: SecretStr = Field(
        default=SecretStr(""), description="the same on all nodes; needed beyond loopback"
    )
    peer_stall_s: float = Field(default=2.0, gt=0, description="a peer silent so long is given up")
    peer_transport: Literal["tcp", "nixl"] = Field(
        default="tcp", description="nixl: the extra of that name, on all nodes"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.nvme_bytes and self.nvme_path is None:
            raise ValueError("nvme_bytes without nvme_path")
        if self.low_watermark >= self.high_watermark:
            raise ValueError("low_watermark lies below high_watermark")
        if self.peer_port is not None:
            self._may_be_reached()
        return self

    def _may_be_reached(self) -> None:
        if not self.peer_secret.get_secret_value() and not _is_loopback(self.peer_host):
            raise ValueError("peer_host other than loopback needs peer_secret")
        if self.peer_host in _ANY_ADDRESS and not self.peer_advertise:
            raise ValueError(f"peer_host {self.peer_host} needs peer_advertise")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def find_unknown_names(environ: Mapping[str, str]) -> list[str]:
    """Names with kvd's prefix that no setting owns; pydantic-settings passes over them silently."""
    known = {ENV_PREFIX + name.upper() for name in KvdSettings.model_fields}
    return sorted(n for n in environ if n.upper().startswith(ENV_PREFIX) and n.upper() not in known)
