"""What the environment is told when it makes no sense."""

from __future__ import annotations

import pytest

from pipeline.errors import SettingsInvalid, UnknownSettings
from pipeline.settings import PipelineSettings, load_pipeline_settings, read_settings
from workers.settings import WorkerSettings


def test_a_misspelt_name_is_refused_whoever_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POINTSMAN_WORKER_ROLL", "decode")
    assert load_pipeline_settings() == PipelineSettings()
    with pytest.raises(UnknownSettings, match="POINTSMAN_WORKER_ROLL"):
        read_settings(WorkerSettings)


def test_each_value_that_makes_no_sense_is_told_with_its_variable_and_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POINTSMAN_WORKER_ROLE", "sesame")
    monkeypatch.setenv("POINTSMAN_WORKER_MAX_WAITING", "-3")
    with pytest.raises(SettingsInvalid) as refused:
        read_settings(WorkerSettings)
    first, second = str(refused.value).splitlines()
    assert first.startswith("POINTSMAN_WORKER_ROLE: Input should be 'prefill', 'decode' or 'both'")
    assert second.startswith("POINTSMAN_WORKER_MAX_WAITING: Input should be greater")
    assert "sesame" not in str(refused.value)
