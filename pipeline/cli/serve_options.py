"""What `pointsman serve` was asked for, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pipeline.cli.errors import OptionInvalid

ROLES = ("prefill", "decode", "both")
MAX_WORKERS = 64
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class EngineName(StrEnum):
    """torch runs the model; digest and script are the test engines."""

    TORCH = "torch"
    DIGEST = "digest"
    SCRIPT = "script"


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """One machine's worth of Pointsman. Ports are TCP ports, sizes bytes, durations seconds.

    `models` are directories, GGUF files or script files; without any, the packaged model is served.
    `workers` are so many of each role for each model.
    `model_bytes`: of all models' workers together, who are then started when they are asked for; None:
    all stay. `keep_warm` are models that always stay. `flower_port` None leaves Flower out;
    `redis_url` None starts a Redis of our own.
    """

    host: str
    port: int
    models: tuple[str, ...]
    engine: EngineName
    workers: Mapping[str, int]
    redis_url: str | None
    flower_port: int | None
    keys_file: Path | None
    kv_dram_bytes: int
    kv_nvme_bytes: int
    drain_s: float
    model_bytes: int | None = None
    keep_warm: tuple[str, ...] = ()


def parse_workers(text: str) -> dict[str, int]:
    """`prefill=1,decode=2` as a mapping; together they must be able to finish a request.

    Raises:
        OptionInvalid: an unknown role, a count that makes no sense, or nobody who decodes.
    """
    counts: dict[str, int] = {}
    for item in text.split(","):
        role, _, number = item.strip().partition("=")
        if role not in ROLES or role in counts or not re.fullmatch(r"\d{1,2}", number):
            raise OptionInvalid("--workers", text, "for example prefill=1,decode=2 or both=1")
        counts[role] = int(number)
    if not 1 <= sum(counts.values()) <= MAX_WORKERS:
        raise OptionInvalid("--workers", text, f"1 to {MAX_WORKERS} workers in all")
    if counts.get("decode", 0) + counts.get("both", 0) == 0:
        raise OptionInvalid("--workers", text, "at least one decode (or both) worker")
    return counts


def parse_bytes(text: str, option: str) -> int:
    """`2GiB`, `512M`, `0` as bytes; units are powers of 1024.

    Raises:
        OptionInvalid: not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise OptionInvalid(option, text, "a size such as 512MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2]])
