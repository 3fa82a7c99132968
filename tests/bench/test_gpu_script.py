"""The script for a lent GPU works, as far as a CPU can show it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("gpu.sh")


def rehearse(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, "--device", "cpu", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=230,
        env={**os.environ, "PYTHON": sys.executable, **env},
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_rehearsal_checks_first_and_ends_with_all_figures_as_json() -> None:
    done = rehearse()

    assert done.returncode == 0, done.stderr
    assert "2 passed" in done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["device"] == "cpu (rehearsal)"
    assert figures["errors"] == {}
    loads = {step["load"]: step for step in figures["steps"]}
    assert set(loads) == {
        *(f"decode, batch of {size}" for size in (1, 2, 5)),
        *(f"prefill of {size}" for size in (64, 300)),
    }
    assert all(step["tokens_per_s"] > 0 for step in loads.values())
    assert {"gflops_per_s", "percent_of_peak", "percent_of_floor"} <= set(loads["prefill of 300"])
    assert figures["tier_moves"]["read_percent_of_link"] > 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_fails_is_named_in_the_json_and_the_rest_is_measured() -> None:
    done = rehearse("--batches", "1,0", "--prompts", "64", PYTEST_ADDOPTS="--no-such-option")

    assert done.returncode == 1
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures["errors"]) == {"checks", "steps", "decode, batch of 0"}
    assert [step["load"] for step in figures["steps"]] == ["decode, batch of 1", "prefill of 64"]
    assert figures["tier_moves"]["write_percent_of_link"] > 0


def test_without_a_working_python_the_last_line_is_json_too() -> None:
    done = rehearse(PYTHON="false")

    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1])["errors"] == {
        "checks": "pytest ended with 1",
        "gpu.py": "ended with 1",
    }


def test_an_unknown_device_is_refused() -> None:
    done = subprocess.run(
        [SCRIPT, "--device", "tpu"], capture_output=True, text=True, check=False, timeout=30
    )

    assert done.returncode == 2
    assert "cpu or cuda" in done.stderr
