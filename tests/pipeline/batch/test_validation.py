"""What an input file may look like, and what is said when it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.batch import validation
from pipeline.batch.validation import MAX_ERRORS, Validator, Verdict

Line = Callable[..., bytes]


def validate(shelf: Any, data: bytes) -> Verdict:
    verdict = Validator(shelf.lines, shelf.storage).run(shelf.order(data), lambda: True)
    assert verdict is not None
    return verdict


def found(verdict: Verdict) -> list[tuple[str, int | None]]:
    return [(error["code"], error["line"]) for error in verdict.errors]


def test_marks_blanks_and_line_ends_do_not_count(shelf: Any, make_input_line: Line) -> None:
    data = b"\xef\xbb\xbf" + b"\r\n".join(
        [make_input_line("a"), b"", b"  ", make_input_line("b"), make_input_line("c")]
    )
    batch = shelf.order(data)
    verdict = Validator(shelf.lines, shelf.storage).run(batch, lambda: True)
    assert verdict is not None
    assert (verdict.num_lines, verdict.model, verdict.errors) == (3, "m", [])
    places = shelf.lines.pending(batch.number, after_line=0, limit=9)
    assert [(place.line, place.custom_id) for place in places] == [(1, "a"), (4, "b"), (5, "c")]
    for place in places:
        part = data[place.start_byte : place.start_byte + place.num_bytes]
        assert json.loads(part)["custom_id"] == place.custom_id


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[]", "invalid_json_line"),
        (b"\xff", "invalid_json_line"),
        (b'{"a": NaN}', "invalid_json_line"),
        (b"{}", "invalid_custom_id"),
        (b'{"custom_id":"b"}', "invalid_method"),
        (b'{"custom_id":"b","method":"GET"}', "invalid_method"),
        (b'{"custom_id":"b","method":"POST","url":"/v1/chat/completions"}', "invalid_url"),
        (b'{"custom_id":"b","method":"POST","url":"/v1/completions"}', "invalid_body"),
        (b'{"custom_id":"b","method":"POST","url":"/v1/completions","body":1}', "invalid_body"),
        (b" " * (16 * 2**20) + b"{}", "line_too_long"),
    ],
)
def test_a_line_that_is_no_request_is_named(
    shelf: Any, make_input_line: Line, line: bytes, code: str
) -> None:
    verdict = validate(shelf, b"\n".join([make_input_line("a"), line, make_input_line("c")]))
    assert found(verdict) == [(code, 2)]
    assert shelf.lines.pending(1, after_line=0, limit=9) == []


def test_all_bad_lines_are_named_up_to_a_limit(shelf: Any) -> None:
    verdict = validate(shelf, b"x\n" * 500)
    assert found(verdict) == [("invalid_json_line", line + 1) for line in range(MAX_ERRORS)]


def test_a_file_without_a_request_is_empty(shelf: Any) -> None:
    assert found(validate(shelf, b"\n \r\n")) == [("empty_file", None)]


def test_a_file_has_a_greatest_number_of_requests(
    shelf: Any, make_input: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "MAX_REQUESTS", 3)
    assert found(validate(shelf, make_input(3))) == []
    assert found(validate(shelf, make_input(9))) == [("too_many_requests", 4)]


def test_an_interrupted_validation_begins_again(
    shelf: Any, make_input: Callable[[int], bytes]
) -> None:
    batch = shelf.order(make_input(2500))
    validator = Validator(shelf.lines, shelf.storage)
    answers = iter([True, False])
    assert validator.run(batch, lambda: next(answers)) is None
    verdict = validator.run(batch, lambda: True)
    assert verdict is not None
    assert verdict.num_lines == 2500
    assert len(list(shelf.lines.ended(batch.number))) == 2500
