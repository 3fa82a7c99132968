"""The results file survives what happens to files."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from pipeline.batch.errors import ResultsBusy, ResultsDamaged
from pipeline.batch.results import ResultsFile, response_line


def append(file: ResultsFile, custom_id: str) -> None:
    file.append(custom_id, response_line(custom_id, 200, "req", {"usage": {}}))


def test_a_line_can_be_read_as_soon_as_it_was_appended(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "out.jsonl")
    append(file, "a")
    line = orjson.loads((tmp_path / "out.jsonl").read_bytes())
    file.close()
    assert line["custom_id"] == "a"
    assert line["response"] == {"status_code": 200, "request_id": "req", "body": {"usage": {}}}
    assert line["error"] is None
    assert line["id"].startswith("batch_req_")


def test_finished_requests_are_known_after_opening_again(tmp_path: Path) -> None:
    for custom_id in ("a", "b"):
        file = ResultsFile(tmp_path / "out.jsonl")
        append(file, custom_id)
        file.close()
    file = ResultsFile(tmp_path / "out.jsonl")
    file.close()
    assert file.is_finished("a")
    assert file.is_finished("b")
    assert not file.is_finished("c")


def test_a_cut_last_line_is_removed_and_its_request_is_not_finished(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    file = ResultsFile(path)
    append(file, "a")
    append(file, "b")
    file.close()
    path.write_bytes(path.read_bytes()[:-10])
    file = ResultsFile(path)
    append(file, "c")
    file.close()
    assert [orjson.loads(line)["custom_id"] for line in path.read_bytes().splitlines()] == [
        "a",
        "c",
    ]
    assert not file.is_finished("b")


@pytest.mark.parametrize("line", ["{}", "not json", "[1]", '{"custom_id": "a", "method": "POST"}'])
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path, line: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(ResultsDamaged, match="line 1"):
        ResultsFile(path)
    assert path.read_text() == f"{line}\n"


def test_two_runs_cannot_write_the_same_file(tmp_path: Path) -> None:
    file = ResultsFile(tmp_path / "out.jsonl")
    with pytest.raises(ResultsBusy):
        ResultsFile(tmp_path / "out.jsonl")
    file.close()
