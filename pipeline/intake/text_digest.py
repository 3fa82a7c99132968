"""A digest of what a model's text side is made of: tokenizer, chat template, and what goes with them."""

from __future__ import annotations

import hashlib
from pathlib import Path

# What `HfVocabulary` and `ChatTemplate` read.
_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
)


def text_digest(engine: str, model: Path | None) -> str:
    """Equal ones read and write text alike, wherever their files lie; a missing file counts as one.

    `model` is the model's directory, or the script book's file. Reads files.

    Raises:
        OSError: one of them is there and cannot be read.
    """
    digest = hashlib.sha256(f"pointsman text 1 {engine}".encode())
    if model is not None:
        paths = [model] if engine == "script" else [model / name for name in _TEXT_FILES]
        for path in paths:
            content = path.read_bytes() if path.exists() else b""
            digest.update(f"\n{len(content)} ".encode() + hashlib.sha256(content).digest())
    return digest.hexdigest()[:16]
