"""Cases C079, C164, C166, C168: clients in the versions that people have, each in an environment of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.clients.conftest import MakeVenv
from tests.flow.rig import Rig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
OPENAI = ("1.109.1", "2.54.0", "3.57.0")


def run(*command: str | Path, limit_s: float = 120, **env: str) -> str:
    """What a client wrote; it must end with 0."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limit_s, env=kept | env, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("version", OPENAI)
def test_c164_openai_python_does_it_all(
    rig: Rig, make_venv: MakeVenv, version: str, kind: str
) -> None:
    python = make_venv(f"openai=={version}")
    script = HERE / "openai_script.py"
    said = run(python, "-W", "error", script, f"{rig.base_url}/v1", kind)
    assert said == f"openai {version} {kind}: 7 parts\n"


def test_c168_langchain_and_litellm_read_every_answer(rig: Rig, make_venv: MakeVenv) -> None:
    python = make_venv("langchain-openai==1.7.4", "litellm==1.110.2")
    script = HERE / "libraries_script.py"
    run(python, script, f"{rig.base_url}/v1", LITELLM_LOCAL_MODEL_COST_MAP="true")


def test_c168_the_llm_command_chats_and_streams(
    rig: Rig, make_venv: MakeVenv, tmp_path: Path
) -> None:
    entry = {"model_id": "ours", "model_name": "m", "api_base": f"{rig.base_url}/v1"}
    completing = entry | {"model_id": "raw", "completion": True}
    path = tmp_path / "extra-openai-models.yaml"
    path.write_text(yaml.safe_dump([entry, completing]))
    llm = make_venv("llm==0.36").parent / "llm"
    env = {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "unused"}
    for arguments in (("-m", "ours"), ("-m", "ours", "--no-stream"), ("-m", "raw")):
        assert run(llm, "prompt", *arguments, "hi", **env).strip() == "Hello, world!"


def test_c079_aiohttp_keeps_its_connections_for_two_minutes(rig: Rig, make_venv: MakeVenv) -> None:
    python = make_venv("aiohttp>=3.13,<4")
    script = HERE / "aiohttp_script.py"
    assert run(python, script, f"{rig.base_url}/v1", "24", limit_s=300) == "4 connections\n"
