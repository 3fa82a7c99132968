"""`pointsman batch` against a real gateway, and a batch whose time runs out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.flow.batches import batch_line, ids_of, order, result_lines, sdk, wait_over
from tests.flow.rig import REPOSITORY, Rig, wait_until

DEADLINE_S = 6


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    env = {
        "POINTSMAN_WORKER_STEP_DELAY_MS": "30",
        "POINTSMAN_WORKER_MAX_BATCH_SEQUENCES": "4",
        "POINTSMAN_BATCH_DEADLINE_S": str(DEADLINE_S),
    }
    return make_rig(env=env)


def pointsman(
    rig: Rig, *arguments: object, url: str | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline.cli.main", "batch", *map(str, arguments)]
    env = {name: text for name, text in os.environ.items() if not name.startswith("POINTSMAN_")}
    return subprocess.run(
        [*command, "--url", url or rig.base_url],
        cwd=REPOSITORY,
        env=env | more,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_a_batch_from_the_shell_is_submitted_watched_and_fetched(rig: Rig, tmp_path: Path) -> None:
    lines = [batch_line("good", max_tokens=3), batch_line("bad", max_tokens=-1)]
    submitted = pointsman(rig, "submit", written(tmp_path / "in.jsonl", *lines))
    assert submitted.returncode == 0, submitted.stderr
    batch_id = submitted.stdout.strip()
    assert batch_id.startswith("batch_")

    watched = pointsman(rig, "watch", batch_id)
    assert watched.returncode == 0, watched.stdout
    sentence = f"{batch_id}: completed, 2 of 2 ended (1 completed, 1 failed), 3 tokens"
    assert sentence in watched.stdout
    assert sentence in pointsman(rig, "status", batch_id).stdout
    assert batch_id in pointsman(rig, "status").stdout

    output, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    fetched = pointsman(rig, "fetch", batch_id, "-o", output, "--errors", errors)
    assert fetched.returncode == 0, fetched.stdout
    assert json.loads(output.read_text())["custom_id"] == "good"
    assert json.loads(errors.read_text())["response"]["status_code"] == 400
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_is_run_without_a_gateway_and_gone_on_with(rig: Rig, tmp_path: Path) -> None:
    lines = [batch_line(f"r{number}", f"prompt {number}", max_tokens=5) for number in range(12)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    written(source, *lines[:11], batch_line("bad", max_tokens=-1), lines[11])
    redis_url = {"POINTSMAN_REDIS_URL": rig.redis_server.url, "POINTSMAN_NODE": "shell"}
    expected = sdk(rig).completions.create(
        model="m", prompt="prompt 7", temperature=0, max_tokens=5
    )
    rig.kill("gateway")
    try:
        ran = pointsman(rig, "run", source, "-o", output, url="redis", **redis_url)
        again = pointsman(rig, "run", source, "-o", output, url="redis", **redis_url)
    finally:
        rig.start_gateway()

    assert ran.returncode == again.returncode == 0, ran.stdout + ran.stderr
    assert "13 of 13 ended (12 done, 1 failed, 0 from earlier runs)" in ran.stdout
    assert "13 of 13 ended (0 done, 0 failed, 13 from earlier runs)" in again.stdout
    results = {
        entry["custom_id"]: entry for entry in map(json.loads, output.read_text().split("\n")[:-1])
    }
    assert set(results) == {f"r{number}" for number in range(12)} | {"bad"}
    assert results["bad"]["response"]["status_code"] == 400
    body = results["r7"]["response"]["body"]
    assert body["choices"][0]["text"] == expected.choices[0].text
    assert body["usage"]["completion_tokens"] == 5
    rig.wait_at_rest(5)


def test_a_broken_file_and_an_unknown_batch_are_one_sentence(rig: Rig, tmp_path: Path) -> None:
    broken = [batch_line("a"), "{"]
    answer = pointsman(rig, "submit", "--watch", written(tmp_path / "in.jsonl", *broken))
    assert answer.returncode == 1
    assert "failed" in answer.stdout
    assert "line 2: The line is not valid JSON" in answer.stdout
    for command in ("status", "watch", "cancel"):
        answer = pointsman(rig, command, "batch_unknown")
        assert answer.returncode == 1
        assert answer.stdout == "batch: the gateway answered 404: There is no such batch.\n"
    assert "Traceback" not in answer.stderr


def test_a_batch_is_cancelled_from_the_shell(rig: Rig, tmp_path: Path) -> None:
    slow = [batch_line(f"s{number}", max_tokens=200) for number in range(3)]
    batch_id = pointsman(rig, "submit", written(tmp_path / "in.jsonl", *slow)).stdout.strip()
    early = pointsman(rig, "fetch", batch_id, "-o", tmp_path / "out.jsonl")
    assert early.returncode == 1
    assert not (tmp_path / "out.jsonl").exists()
    cancelled = pointsman(rig, "cancel", batch_id)
    assert cancelled.returncode == 0
    assert f"{batch_id}: cancelled, " in cancelled.stdout
    rig.wait_at_rest(5)


def test_a_batch_whose_time_is_over_keeps_what_is_done_and_names_the_rest(rig: Rig) -> None:
    client = sdk(rig)
    lines = [batch_line(f"r{number}", f"{number}", max_tokens=40) for number in range(64)]
    batch = order(client, lines)
    assert batch.expires_at == batch.created_at + DEADLINE_S
    ended = wait_over(client, batch.id)

    assert ended.status == "expired"
    assert ended.expired_at is not None
    output = result_lines(client, ended.output_file_id)
    errors = result_lines(client, ended.error_file_id)
    assert sorted(ids_of(output) + ids_of(errors)) == sorted(f"r{number}" for number in range(64))
    assert output
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    rig.wait_at_rest(5)


def test_an_expired_batch_is_ended_by_whoever_comes_next(rig: Rig) -> None:
    client = sdk(rig)
    batch = order(client, [batch_line(f"r{number}", max_tokens=200) for number in range(32)])
    wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    rig.kill("gateway")
    rig.start_gateway()
    ended = wait_over(sdk(rig), batch.id)
    assert ended.status == "expired"
    rig.wait_at_rest(5)
