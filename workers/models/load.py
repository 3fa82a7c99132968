"""Choosing an engine by name; torch is imported only for the engine that needs it."""

from __future__ import annotations

from pathlib import Path

from pipeline.script_book import ScriptBook
from workers.model import ModelRunner
from workers.models.digest import DigestRunner
from workers.models.errors import EngineNotKnown, ModelFilesMissing
from workers.models.script import ScriptRunner

ENGINES = ("torch", "digest", "script")


def load_runner(
    engine: str,
    model: Path | None,
    *,
    block_tokens: int = 16,
    dtype: str = "float32",
    device: str = "cpu",
    step_delay_ms: float = 0.0,
) -> ModelRunner:
    """The engine called `engine`, ready for `make_pool`.

    `model` is a Hugging Face directory for torch and a script book for script (the built-in book
    without one); digest has none. `dtype` is torch's: "float32", "bfloat16", "int8", or "auto", which is
    bfloat16 on a GPU and where the native operators run, and float32 elsewhere; so is `device`, "cpu"
    or "cuda". `step_delay_ms` is digest's.

    Raises:
        EngineNotKnown: no engine has this name.
        ModelFilesMissing: the model's files are not all there.
        ModelRefused: the model cannot be run exactly.
        ValueError: the script book is not one.
    """
    if engine == "digest":
        return DigestRunner(block_tokens=block_tokens, step_delay_ms=step_delay_ms)
    if engine == "script":
        book = ScriptBook.built_in() if model is None else ScriptBook.load(model)
        return ScriptRunner(book, block_tokens=block_tokens)
    if engine != "torch":
        raise EngineNotKnown(engine, ENGINES)
    if model is None:
        raise ModelFilesMissing("engine torch", "model directory")
    from workers.models.torch_runner import TorchRunner  # noqa: PLC0415  # loads torch

    return TorchRunner(model, block_tokens=block_tokens, dtype=dtype, device=device)
