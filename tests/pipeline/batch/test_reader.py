"""Reading batch files as people make them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.batch.errors import BatchFileInvalid
from pipeline.batch.reader import check_requests, read_requests

MakeLine = Callable[..., str]


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    return path


def test_mark_crlf_blank_lines_and_a_missing_last_newline_are_let_pass(
    tmp_path: Path, make_line: MakeLine
) -> None:
    a, b = make_line("a").encode(), make_line("b").encode()
    path = write(tmp_path, b"\xef\xbb\xbf" + a + b"\r\n\r\n  \n" + b)
    assert [(r.line_number, r.custom_id) for r in read_requests(path)] == [(1, "a"), (4, "b")]
    assert check_requests(path) == 2


def test_an_empty_file_holds_no_request(tmp_path: Path) -> None:
    assert check_requests(write(tmp_path, b"\n\n")) == 0


def test_a_custom_id_that_comes_twice_is_refused_with_its_line(
    tmp_path: Path, make_line: MakeLine
) -> None:
    path = write(tmp_path, "\n".join([make_line("a"), make_line("b"), make_line("a")]).encode())
    with pytest.raises(BatchFileInvalid, match=r"line 3: custom_id 'a'"):
        check_requests(path)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ('{"a": NaN}', "not JSON"),
        ("[]", "not a JSON object"),
        ('{"method":"POST","url":"/v1/completions","body":{}}', "custom_id"),
        ('{"custom_id":"","method":"POST","url":"/v1/completions","body":{}}', "custom_id"),
        ('{"custom_id":7,"method":"POST","url":"/v1/completions","body":{}}', "custom_id"),
        ('{"custom_id":"x","method":"GET","url":"/v1/completions","body":{}}', "method"),
        ('{"custom_id":"x","method":"POST","url":"/v1/embeddings","body":{}}', "url"),
        ('{"custom_id":"x","method":"POST","url":"/v1/completions","body":[]}', "body"),
        (
            '{"custom_id":"x","method":"POST","url":"/v1/completions","body":{"stream":true}}',
            "stream",
        ),
    ],
)
def test_a_line_that_is_no_request_is_refused_with_its_number(
    tmp_path: Path, make_line: MakeLine, line: str, problem: str
) -> None:
    path = write(tmp_path, f"{make_line('a')}\n{line}\n".encode())
    with pytest.raises(BatchFileInvalid, match=f"line 2: .*{problem}"):
        check_requests(path)
