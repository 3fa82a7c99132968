"""A worker's settings."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from pipeline.scheduling.fleet import Role
from tiering.block_layout import BlockLayout
from workers.model import DeviceMemory
from workers.settings import EngineSettings, WorkerSettings

GIB = 2**30
SMOL = BlockLayout(num_layers=30, block_tokens=16, num_kv_heads=3, head_dim=64, dtype="float32")


def test_the_pool_is_sized_by_bytes_unless_a_number_of_blocks_is_given() -> None:
    assert WorkerSettings().engine_settings(SMOL).num_blocks == 256 * 2**20 // SMOL.block_bytes
    assert WorkerSettings(num_blocks=64).engine_settings(SMOL).num_blocks == 64


@pytest.mark.parametrize(
    ("settings", "memory", "pool_bytes"),
    [
        ({}, DeviceMemory(80 * GIB, 16 * GIB, 63 * GIB), 72 * GIB - 16 * GIB),
        ({"hbm_share": 0.45}, DeviceMemory(80 * GIB, 16 * GIB, 63 * GIB), 36 * GIB - 16 * GIB),
        ({"hbm_share": 0.45}, DeviceMemory(80 * GIB, 16 * GIB, 7 * GIB), 7 * GIB),  # a neighbour
        ({"hbm_bytes": GIB}, DeviceMemory(80 * GIB, 16 * GIB, 63 * GIB), GIB),
    ],
)
def test_on_a_gpu_the_pool_has_what_its_share_leaves_beside_the_weights(
    settings: dict[str, float], memory: DeviceMemory, pool_bytes: int
) -> None:
    engine = WorkerSettings.model_validate(settings).engine_settings(SMOL, memory)
    assert engine.num_blocks == pool_bytes // SMOL.block_bytes


def test_a_pool_that_holds_no_block_is_refused_with_the_figures() -> None:
    with pytest.raises(ValueError, match=r"pool of 65536 bytes holds 0 blocks of 737280 bytes"):
        WorkerSettings(hbm_bytes=2**16).engine_settings(SMOL)
    full = DeviceMemory(total=16 * GIB, own=15 * GIB, free=GIB)
    with pytest.raises(ValueError, match=r"pool of 0 bytes holds 0 blocks.*raise.*hbm_share"):
        WorkerSettings().engine_settings(SMOL, full)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_WORKER_ROLE", "prefill")
    monkeypatch.setenv("POINTSMAN_WORKER_MAX_BATCH_TOKENS", "48")
    monkeypatch.setenv("POINTSMAN_WORKER_KVD", "off")
    monkeypatch.setenv("POINTSMAN_WORKER_SPECULATION_TOKENS", "5")
    settings = WorkerSettings()
    assert settings.role is Role.PREFILL
    assert settings.engine_settings(SMOL).max_batch_tokens == 48
    assert settings.engine_settings(SMOL).speculation_tokens == 5
    assert not settings.kvd


@pytest.mark.parametrize(
    "nonsense", [{"num_blocks": 1}, {"max_batch_tokens": 1}, {"drain_s": -1}, {"typo": 1}]
)
def test_nonsense_is_refused(nonsense: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        WorkerSettings.model_validate(nonsense)


def test_an_engine_that_could_make_no_progress_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        EngineSettings(num_blocks=0)
    with pytest.raises(ValueError, match="max_batch_tokens"):
        EngineSettings(num_blocks=4, max_batch_tokens=1)
