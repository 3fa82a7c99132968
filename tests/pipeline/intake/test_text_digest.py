"""A model's text side is known by what its files hold, wherever they lie."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.intake.text_digest import text_digest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        (made / name).write_text(name)
    return made


def test_a_copy_has_the_same_digest(directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(directory, tmp_path / "copy")
    (copy / "model.safetensors").write_text("other weights, the same text")
    assert text_digest("torch", copy) == text_digest("torch", directory)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "chat_template.jinja"])
def test_another_text_side_has_another_digest(directory: Path, name: str) -> None:
    before = text_digest("torch", directory)
    (directory / name).write_text("other")
    assert text_digest("torch", directory) != before


def test_what_stands_in_one_file_cannot_stand_for_another(directory: Path) -> None:
    before = text_digest("torch", directory)
    (directory / "config.json").rename(directory / "generation_config.json")
    assert text_digest("torch", directory) != before


def test_a_script_book_is_known_by_its_content(tmp_path: Path) -> None:
    book, other = tmp_path / "a.json", tmp_path / "b.json"
    book.write_text("{}")
    other.write_text("{}")
    assert text_digest("script", book) == text_digest("script", other)
    other.write_text("[]")
    assert text_digest("script", book) != text_digest("script", other)
    assert text_digest("digest", None) != text_digest("script", None)
