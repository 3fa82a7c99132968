"""The script for a lent GPU works, as far as a CPU can show it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("gpu.sh")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_rehearsal_checks_first_and_ends_with_all_figures_as_json() -> None:
    done = subprocess.run(
        [SCRIPT, "--device", "cpu"],
        capture_output=True,
        text=True,
        check=False,
        timeout=230,
        env={**os.environ, "PYTHON": sys.executable},
    )

    assert done.returncode == 0, done.stderr
    assert "2 passed" in done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["device"] == "cpu (rehearsal)"
    loads = {step["load"]: step for step in figures["steps"]}
    assert set(loads) == {
        *(f"decode, batch of {size}" for size in (1, 2, 5)),
        *(f"prefill of {size}" for size in (64, 300)),
    }
    assert all(step["tokens_per_s"] > 0 for step in loads.values())
    assert {"gflops_per_s", "percent_of_peak", "percent_of_floor"} <= set(loads["prefill of 300"])
    assert figures["tier_moves"]["read_percent_of_link"] > 0


def test_an_unknown_device_is_refused() -> None:
    done = subprocess.run(
        [SCRIPT, "--device", "tpu"], capture_output=True, text=True, check=False, timeout=30
    )

    assert done.returncode == 2
    assert "cpu or cuda" in done.stderr
