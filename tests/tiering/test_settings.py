"""Settings of kvd."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from tiering.settings import KvdSettings, find_unknown_names


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_KVD_SOCKET", "/run/kvd.sock")
    monkeypatch.setenv("POINTSMAN_KVD_DRAM_BYTES", "8192")
    settings = KvdSettings()
    assert (settings.socket, settings.dram_bytes) == (Path("/run/kvd.sock"), 8192)
    assert settings.nvme_bytes == 0


@pytest.mark.parametrize(
    "nonsense",
    [
        {"dram_bytes": 10},
        {"nvme_bytes": -1},
        {"nvme_bytes": 1 << 20},
        {"low_watermark": 0.9, "high_watermark": 0.9},
        {"io_timeout_s": 0},
        {"peer_port": 7000, "peer_host": "10.0.0.1"},
        {"peer_port": 7000, "peer_host": "0.0.0.0", "peer_secret": "x"},  # noqa: S104
        {"peer_port": 70_000},
    ],
)
def test_nonsense_is_refused(nonsense: dict[str, object]) -> None:
    values = {"socket": "/s", "dram_bytes": 1 << 20} | nonsense
    with pytest.raises(ValidationError):
        KvdSettings.model_validate(values)


def test_a_misspelt_name_is_found() -> None:
    environ = {"POINTSMAN_KVD_DRAM_BYTE": "1", "POINTSMAN_KVD_SOCKET": "/s", "POINTSMAN_X": "1"}
    assert find_unknown_names(environ) == ["POINTSMAN_KVD_DRAM_BYTE"]


def test_peers_are_let_in_from_elsewhere_with_a_secret_only() -> None:
    values = {"socket": "/s", "dram_bytes": 1 << 20, "peer_port": 7000}
    assert KvdSettings.model_validate(values).peer_host == "127.0.0.1"
    settings = KvdSettings.model_validate(
        values | {"peer_host": "10.0.0.1", "peer_secret": "very secret"}
    )
    assert "very secret" not in repr(settings)
