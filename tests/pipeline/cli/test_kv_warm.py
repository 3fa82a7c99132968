"""What `pointsman kv warm` reads from its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.errors import CommandRefused
from pipeline.cli.kv_warm import read_prompts


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_lines_are_text_or_json(tmp_path: Path) -> None:
    lines = 'Once upon\n\n{"prompt": [1, 2]}\n{"messages": [{"role": "user", "content": "hi"}]}\n'
    assert list(read_prompts(written(tmp_path / "f", lines))) == [
        (1, "completions", {"prompt": "Once upon"}),
        (3, "completions", {"prompt": [1, 2]}),
        (4, "chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ]


def test_what_shapes_a_prompt_goes_along_and_what_shapes_the_answer_does_not(
    tmp_path: Path,
) -> None:
    line = (
        '{"messages": [], "tools": [1], "cache_salt": "s", "model": "m", "cache": false, "n": 3}\n'
    )
    ((_, route, fields),) = read_prompts(written(tmp_path / "f", line))
    assert route == "chat/completions"
    assert fields == {"messages": [], "tools": [1], "cache_salt": "s", "model": "m"}


@pytest.mark.parametrize(
    ("line", "reason"),
    [('{"prompt":', "broken JSON"), ('{"text": "x"}', "neither"), ("x" * (5 << 20), "longer")],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    with pytest.raises(CommandRefused, match=f"line 2: .*{reason}"):
        list(read_prompts(written(tmp_path / "f", f"good\n{line}\n")))
