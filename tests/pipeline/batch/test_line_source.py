"""Lines as they lie in the file, and the order that shares prefixes."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.batch import line_source
from pipeline.batch.line_source import LineSource, prompt_prefix, split_lines

lines = st.lists(st.binary(max_size=40).filter(lambda data: b"\n" not in data), max_size=8)


@given(lines, st.integers(1, 50))
def test_lines_are_split_as_python_splits_them_whatever_the_reads(
    parts: list[bytes], size: int
) -> None:
    data = b"\n".join(parts)

    class Dribble(io.BytesIO):
        def read(self, _: int | None = -1, /) -> bytes:
            return super().read(size)

    found = list(split_lines(Dribble(data)))
    assert [line for _, line in found] == list(io.BytesIO(data))
    assert all(data[start : start + len(line)] == line for start, line in found)


def test_a_line_without_an_end_in_sight_is_cut_and_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line_source, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(line_source, "READ_BYTES", 8)
    data = b"first\n" + b"x" * 100 + b"\nlast\n"
    found = list(split_lines(io.BytesIO(data)))
    assert found == [(0, b"first\n"), (6, b"x" * 11), (107, b"last\n")]


def test_lines_with_a_common_prefix_come_one_after_the_other(
    shelf: Any, make_input_line: Callable[..., bytes]
) -> None:
    prompts = ["cats: 1", "dogs: 1", "cats: 2", "dogs: 2", "cats: 3"]
    data = b"\n".join(make_input_line(f"{n}", prompt=text) for n, text in enumerate(prompts))
    source = LineSource(shelf.lines, shelf.storage, shelf.accepted(data))
    window = source.next_window()
    assert [line.body()["prompt"] for line in window] == sorted(prompts)
    assert source.next_window() == []
    source.close()


def test_a_window_is_bounded_in_lines_and_bytes(
    shelf: Any, make_input: Callable[[int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = shelf.accepted(make_input(10))
    monkeypatch.setattr(line_source, "LOOK_AHEAD_LINES", 4)
    source = LineSource(shelf.lines, shelf.storage, batch)
    assert [len(source.next_window()) for _ in range(4)] == [4, 4, 2, 0]
    monkeypatch.setattr(line_source, "LOOK_AHEAD_BYTES", 1)
    source = LineSource(shelf.lines, shelf.storage, batch)
    assert [len(source.next_window()) for _ in range(11)] == [1] * 10 + [0]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": [1, 2]},
        {"prompt": [[1], [2]]},
        {"messages": "x"},
        {"messages": [1, None, {"role": 1, "content": {"a": 1}}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"image": 1}]}]},
        {"prompt": [[[[[]]]]] * 5000},
    ],
)
def test_any_body_has_a_prefix_to_sort_by(body: dict[str, Any]) -> None:
    assert len(prompt_prefix(body)) <= 2_048


def test_the_prefix_of_a_chat_begins_with_its_first_message() -> None:
    system = {"role": "system", "content": "You are a cat."}
    ask = [{"role": "user", "content": text} for text in ("a", "b")]
    first, second = (prompt_prefix({"messages": [system, message]}) for message in ask)
    assert first != second
    assert first.startswith("system\nYou are a cat.\nuser\n")
