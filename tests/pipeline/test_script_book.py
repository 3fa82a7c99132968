"""The script book: ids, names and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.script_book import (
    BASE_VOCAB_SIZE,
    BOS_ID,
    EOS_ID,
    IM_END_ID,
    IM_START_ID,
    ScriptBook,
)

BOOK = {
    "context_tokens": 300,
    "scripts": {
        "default": {"pieces": ["caf", {"hex": "C3"}, {"hex": "A9"}, "!"]},
        "long": {"pieces": ["caf", " again", "x"], "ends": False, "token_delay_ms": 5},
    },
}


def test_a_book_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "book.json"
    path.write_text(json.dumps(BOOK))

    book = ScriptBook.load(path)

    assert book.context_tokens == 300
    assert book.scripts["long"].token_delay_ms == 5


def test_single_bytes_come_first_then_specials_then_distinct_pieces_in_file_order() -> None:
    book = ScriptBook.model_validate(BOOK)

    assert book.vocabulary[:256] == tuple(bytes([byte]) for byte in range(256))
    assert (BOS_ID, EOS_ID, IM_START_ID, IM_END_ID) == (256, 257, 258, 259)
    assert book.vocabulary[IM_START_ID] == b"<|im_start|>"
    assert book.pieces == (b"caf", b" again")
    assert book.vocab_size == BASE_VOCAB_SIZE + 2


def test_a_one_byte_piece_has_the_id_of_its_byte() -> None:
    book = ScriptBook.model_validate(BOOK)

    assert book.token_ids("default") == (260, 0xC3, 0xA9, ord("!"))
    assert book.token_ids("long") == (260, 261, ord("x"))


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        (b"hello", "default"),
        (b"say [[long]] please", "long"),
        (b"[[unknown]]", "default"),
        (b"[[long]] then [[default]]", "default"),
        (b"[[long]] then [[unknown]]", "long"),
        (b"[[\xff]] [[", "default"),
    ],
)
def test_the_last_known_name_in_the_prompt_chooses_the_script(prompt: bytes, name: str) -> None:
    assert ScriptBook.model_validate(BOOK).script_name(prompt) == name


@pytest.mark.parametrize(
    "scripts",
    [
        {},
        {"other": {"pieces": ["a"]}},
        {"default": {"pieces": [""]}},
        {"default": {"pieces": [{"hex": "C"}]}},
        {"default": {"pieces": [], "ends": False}},
        {"default": {"pieces": ["a"], "logprob": 0.5}},
        {"default": {"pieces": ["a"], "delay": 5}},
    ],
)
def test_a_book_with_nonsense_is_refused(scripts: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        ScriptBook.model_validate({"scripts": scripts})


def test_the_built_in_book_answers_every_prompt() -> None:
    book = ScriptBook.built_in()

    assert book.script_name(b"anything") == "default"
    assert b"".join(book.scripts["default"].piece_bytes) == b"Hello, world!"


def test_the_gateway_can_use_the_book_without_numpy_or_torch() -> None:
    program = "import sys, pipeline.script_book; print({'numpy', 'torch'} & set(sys.modules))"

    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )

    assert result.stdout.strip() == "set()"
