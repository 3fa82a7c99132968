"""A worker that cannot start says why in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (
            {"POINTSMAN_WORKER_ROLE": "cook"},
            "worker: POINTSMAN_WORKER_ROLE: Input should be 'prefill', 'decode' or 'both'",
        ),
        ({"POINTSMAN_MODEL": "/nowhere"}, "worker: /nowhere has no config.json"),
    ],
)
def test_what_makes_no_sense_is_told_in_one_sentence(
    redis_url: str, env: dict[str, str], sentence: str
) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "workers"],
        cwd=ROOT,
        env={**os.environ, "POINTSMAN_REDIS_URL": redis_url, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert answer.returncode == 2
    assert answer.stderr.splitlines()[-1] == sentence
    assert "Traceback" not in answer.stderr
