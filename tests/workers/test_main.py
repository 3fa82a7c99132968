"""A worker that cannot serve says why on one line, and ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_a_model_that_cannot_be_run_exactly_ends_the_worker_with_the_reason(
    redis_url: str, tmp_path: Path
) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    own = {
        "POINTSMAN_REDIS_URL": redis_url,
        "POINTSMAN_ENGINE": "torch",
        "POINTSMAN_MODEL": str(tmp_path),
    }

    done = subprocess.run(
        [sys.executable, "-m", "workers"],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert done.returncode == 2
    lines = (done.stdout + done.stderr).splitlines()
    assert lines[-1].startswith("worker: cannot run ")
    assert "its weights are quantised" in lines[-1]
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (
            {"POINTSMAN_WORKER_ROLE": "cook"},
            "worker: POINTSMAN_WORKER_ROLE: Input should be 'prefill', 'decode' or 'both'",
        ),
        ({"POINTSMAN_MODEL": "/nowhere"}, "worker: /nowhere has no config.json"),
    ],
)
def test_settings_that_make_no_sense_are_told_in_one_sentence(
    redis_url: str, own: dict[str, str], sentence: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "workers"],
        env={**os.environ, "POINTSMAN_REDIS_URL": redis_url, **own},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == sentence
    assert "Traceback" not in done.stderr


def test_threads_are_set_before_torch_is_loaded() -> None:
    """OpenMP reads its environment when torch loads it, and the root sets that after its imports."""
    program = "import sys, workers.main; print({'torch', 'transformers'} & set(sys.modules))"

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.strip() == "set()"
