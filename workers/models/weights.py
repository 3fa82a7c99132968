"""Reading safetensors files, whole or in shards, and telling one set of weights from another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from workers.models.errors import ModelFilesMissing, ModelRefused

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_READ_BYTES = 1 << 22


class WeightFiles:
    """The tensors of a model directory by name; remembers which were taken."""

    def __init__(self, directory: Path) -> None:
        """Opens the files; tensors are read when taken.

        Raises:
            ModelFilesMissing: there are no weights, or a shard is missing.
            ModelRefused: a file is none of safetensors, or cut short.
        """
        self._directory = directory
        self._file_of: dict[str, Any] = {}
        for path in weight_paths(directory):
            try:
                file: Any = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise ModelRefused(directory.name, f"{path.name}: {error}") from error
            self._file_of.update(dict.fromkeys(file.keys(), file))
        self._left = set(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def take(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor called `name`, in `dtype`.

        Raises:
            ModelFilesMissing: there is no such tensor.
            ModelRefused: it has another shape than the config says, or holds no real numbers.
        """
        if name not in self._file_of:
            raise ModelFilesMissing(str(self._directory), f"weight {name}")
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            found = f"{tuple(tensor.shape)} {tensor.dtype}"
            raise ModelRefused(self._directory.name, f"weight {name} is {found}, not {shape}")
        self._left.discard(name)
        return tensor.to(dtype)

    def take_rows(
        self, names: Iterable[str], dtype: torch.dtype, shapes: Iterable[tuple[int, ...]]
    ) -> torch.Tensor:
        """Several tensors as one, one after the other along the first dimension."""
        pairs = zip(names, shapes, strict=True)
        return torch.cat([self.take(name, dtype, shape) for name, shape in pairs])

    def refuse_leftovers(self, *ignored_endings: str) -> None:
        """A weight that nobody took would be missing from the computation.

        Raises:
            ModelRefused: a weight was not taken and has none of the endings.
        """
        left = sorted(name for name in self._left if not name.endswith(ignored_endings))
        if left:
            raise ModelRefused(self._directory.name, f"it has weights of unknown use: {left[:3]}")


def weight_paths(directory: Path) -> list[Path]:
    """The safetensors files of a model, in a fixed order.

    Raises:
        ModelFilesMissing: there is none, or one that the index names is missing.
        ModelRefused: the index names a file outside the directory.
    """
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    index = directory / _INDEX
    if not index.is_file():
        raise ModelFilesMissing(str(directory), _SINGLE)
    names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    for name in names:
        if Path(name).name != name:
            raise ModelRefused(directory.name, f"its index names {name}, outside the directory")
        if not (directory / name).is_file():
            raise ModelFilesMissing(str(directory), name)
    return [directory / name for name in names]


def fingerprint(directory: Path, dtype: str) -> bytes:
    """sha256 over all that decides the KV bytes of a token sequence, and of a text.

    Files enter by name and content, the weights by xxh3_128 of their content: that tells apart
    models that differ, it does not withstand one made to collide.
    """
    digest = hashlib.sha256(f"pointsman torch engine 1 {dtype}".encode())
    for name in ("config.json", "tokenizer.json"):
        path = directory / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"\n{name} {len(content)} ".encode() + hashlib.sha256(content).digest())
    for path in weight_paths(directory):
        digest.update(f"\n{path.name} {path.stat().st_size} ".encode() + _content_digest(path))
    return digest.digest()


def _content_digest(path: Path) -> bytes:
    digest = xxhash.xxh3_128()
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.digest()
