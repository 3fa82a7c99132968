"""The first calls that an operator pastes."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path

import pytest

from pipeline.cli.data_directory import DataDirectory
from pipeline.cli.deployment import Deployment
from pipeline.cli.model_store import ModelPlan
from pipeline.cli.serve_options import EngineName, ServeOptions
from pipeline.cli.welcome import curl_snippet, openai_snippet, welcome_text


def deployment(host: str = "127.0.0.1", keys_file: Path | None = None) -> Deployment:
    options = ServeOptions(
        host=host,
        port=8000,
        models=(),
        engine=EngineName.TORCH,
        workers={"prefill": 1, "decode": 1},
        redis_url=None,
        flower_port=5555,
        keys_file=keys_file,
        kv_dram_bytes=2**20,
        kv_nvme_bytes=0,
        drain_s=30.0,
    )
    return Deployment(
        options=options,
        data_dir=DataDirectory(Path("/data")),
        redis_url="redis://:secret@127.0.0.1:1/0",
        kvd_socket=Path("/data/run/kvd.sock"),
        plans=(ModelPlan("it's", Path("/data/models/it's")),),
        flower_auth="operator:hidden",
    )


@pytest.mark.parametrize("keys_file", [None, Path("/keys")])
def test_the_curl_snippet_is_one_command_with_a_json_body(keys_file: Path | None) -> None:
    words = shlex.split(curl_snippet(deployment(keys_file=keys_file)))
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's"
    assert body["stream"] is True
    assert words[2] == "http://127.0.0.1:8000/v1/chat/completions"
    assert ("Authorization: Bearer $POINTSMAN_API_KEY" in words) is (keys_file is not None)


@pytest.mark.parametrize("keys_file", [None, Path("/keys")])
def test_the_python_snippet_is_a_program(keys_file: Path | None) -> None:
    program = openai_snippet(deployment(keys_file=keys_file))
    ast.parse(program)
    assert ("os.environ" in program) is (keys_file is not None)


def test_no_line_is_too_long_to_paste_and_no_secret_is_shown() -> None:
    text = welcome_text(deployment()).plain
    assert max(len(line) for line in text.splitlines()) <= 79
    assert "secret" not in text
    assert "hidden" not in text
    assert "/data/flower.auth" in text


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),  # noqa: S104 (a listener's address)
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("10.0.0.5", "http://10.0.0.5:8000"),
    ],
)
def test_the_url_is_one_that_a_client_can_use(host: str, url: str) -> None:
    assert deployment(host).base_url == url
