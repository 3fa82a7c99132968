"""Building the native kernels: once per machine and version, with the compiler that is there.

The library speaks C over plain addresses and needs no header of Python or torch, so that a build
takes seconds and outlives an upgrade of either.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

SOURCES = Path(__file__).parent / "cpp"
_FLAGS = [
    "-O3",
    "-std=c++20",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512bf16",
    "-mavx512vnni",
    "-mfma",
    "-ffp-contract=off",  # or a sum is fused with a product in one place and not in another
    "-shared",
    "-fPIC",
    "-pthread",
    "-w",
]
_NEEDED_CPU_FLAGS = {
    *("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"),
    *("avx512_vnni", "fma"),
}
_COMPILERS = ("c++", "g++", "clang++")
_BUILD_LIMIT_S = 300


class NativeKernelsMissing(Exception):
    """The native kernels cannot be used here; the reason says what is missing."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"no native kernels: {self.reason}"


@cache
def native_library() -> ctypes.CDLL:
    """The loaded library, built where this machine has none yet.

    Raises:
        NativeKernelsMissing: wrong CPU, no compiler, no place to build, or the build failed.
    """
    missing = sorted(_NEEDED_CPU_FLAGS - _cpu_flags())
    if missing:
        raise NativeKernelsMissing(f"this CPU lacks {', '.join(missing)}")
    path = cache_directory() / f"kernels-{_source_digest()}.so"
    try:
        if not path.is_file():
            _build_once(path)
        return ctypes.CDLL(str(path))
    except OSError as error:  # a read-only home, a full disk, a mount without execution
        raise NativeKernelsMissing(
            f"{path.parent} is not usable ({error}); XDG_CACHE_HOME names another place"
        ) from error


def cache_directory() -> Path:
    """Where libraries are kept: $XDG_CACHE_HOME/pointsman, by default ~/.cache/pointsman."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pointsman"


def _build_once(path: Path) -> None:
    """Build unless another process has done it while this one waited for the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "kernels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # falls with the process that holds it
        if not path.is_file():
            _build(path)


def _build(path: Path) -> None:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, _COMPILERS), None)
    if compiler is None:
        raise NativeKernelsMissing("there is no C++ compiler (Debian, Ubuntu: apt install g++)")
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch) / path.name
        command = [*compiler.split(), *_FLAGS, str(SOURCES / "kernels.cpp"), "-o", str(built)]
        try:
            subprocess.run(  # noqa: S603  # the operator's own compiler
                command, check=True, capture_output=True, text=True, timeout=_BUILD_LIMIT_S
            )
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or "").strip().splitlines() or ["it said nothing"]
            raise NativeKernelsMissing(f"{compiler} failed: {lines[0]}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NativeKernelsMissing(f"{compiler} failed: {error}") from error
        built.replace(path)
    log.info("native_kernels_built", path=str(path), build_s=round(time.monotonic() - started_s, 1))


def _source_digest() -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_flags() -> set[str]:
    """Linux's names of what the CPU can do; none where there is no /proc."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    for line in text.splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()
