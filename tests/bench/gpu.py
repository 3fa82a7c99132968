"""What the CUDA engine does on this GPU: decode, prefill, tier moves. Run it by gpu.sh.

The last line is JSON: tokens/s of decode by batch, GFLOP/s of prefill and their share of the
measured peak, GB/s of tier moves and their share of the measured link; what failed stands under
"errors", the rest is measured all the same, and the exit status is ENDED_WITH_ERRORS. No network is
needed: the model has random weights in a real shape, or is a directory given by --model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import transformers

from tests.bench.floor import best_s, peak_of, rows_of
from tests.gpu.machine import BLOCK_TOKENS, DEVICE, engine_on
from workers.hbm_pool import HbmPool
from workers.kernels.device_pool import DevicePool
from workers.model import ModelRunner
from workers.models.bench import Load, measure
from workers.models.families import read_config

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512,
             "num_attention_heads": 4, "num_key_value_heads": 2},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "vocab_size": 128_256, "num_attention_heads": 32, "num_key_value_heads": 8},
    "8b": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
           "vocab_size": 128_256, "num_attention_heads": 32, "num_key_value_heads": 8},
}  # fmt: skip
CONTEXT_TOKENS = 4096
LINK_BYTES = 1 << 28
NUM_MOVED_BLOCKS = 64
ENDED_WITH_ERRORS = 3  # any other status but 0: it ended before it could print JSON
T = TypeVar("T")


def random_model(shape: str, directory: Path) -> Path:
    """A Llama of this shape with random weights in bfloat16."""
    config = transformers.LlamaConfig(
        **SHAPES[shape], max_position_embeddings=CONTEXT_TOKENS, tie_word_embeddings=shape == "1b"
    )
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def loads(batches: list[int], prompts: list[int], context: int) -> tuple[Load, ...]:
    """Decode and prefill."""
    return (
        *(Load(f"decode, batch of {size}", size, context, 1) for size in batches),
        *(Load(f"prefill of {size}", 1, 0, size) for size in prompts),
    )


def tier_moves(block_bytes: int) -> dict[str, float]:
    """GB/s of whole blocks in and out of the pool through host memory, and of the bare link."""
    pool: HbmPool = DevicePool(NUM_MOVED_BLOCKS, block_bytes, DEVICE)
    blocks = list(range(NUM_MOVED_BLOCKS))
    host = np.ones((NUM_MOVED_BLOCKS, block_bytes), dtype=np.uint8)

    def read() -> None:
        for row, data in zip(host, pool.read(blocks), strict=True):
            row[:] = data

    def write() -> None:
        for block_id, row in zip(blocks, host, strict=True):
            pool.begin_write(block_id)[:] = row
            pool.finish_write(block_id)
        pool.settle()

    pinned = torch.ones(LINK_BYTES, dtype=torch.uint8, pin_memory=DEVICE.type == "cuda")
    there = torch.ones(LINK_BYTES, dtype=torch.uint8, device=DEVICE)
    moved = {"read": read, "write": write}
    link = {"read": lambda: pinned.copy_(there), "write": lambda: there.copy_(pinned)}
    figures: dict[str, float] = {}
    for name, run in moved.items():
        figures[f"{name}_gb_per_s"] = gb_per_s(run, NUM_MOVED_BLOCKS * block_bytes)
        figures[f"{name}_link_gb_per_s"] = gb_per_s(link[name], LINK_BYTES)
        share = figures[f"{name}_gb_per_s"] / figures[f"{name}_link_gb_per_s"]
        figures[f"{name}_percent_of_link"] = round(100 * share, 1)
    return figures


def gb_per_s(run: Callable[[], object], num_bytes: int) -> float:
    """Of the fastest run."""
    return round(num_bytes / best_s(run, DEVICE) / 1e9, 2)


def device_name() -> str:
    """As its driver calls it."""
    return torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "cpu (rehearsal)"


def say(words: str) -> None:
    """Progress, beside the result."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {words}\n")


class Report:
    """What was measured so far, and what failed, by part."""

    def __init__(self, checks: int) -> None:
        """checks: with what status the tests before ended."""
        self.figures: dict[str, Any] = {"device": device_name(), "block_tokens": BLOCK_TOKENS}
        self.errors: dict[str, str] = {"checks": f"pytest ended with {checks}"} if checks else {}

    def add(self, part: str, measure_it: Callable[[], T]) -> T | None:
        """Measure a part; None if it failed."""
        say(f"measuring {part}")
        try:
            return measure_it()
        except Exception as error:  # noqa: BLE001  # a lent GPU is not lent twice: go on with the rest
            self.errors[part] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            return None


def steps(
    report: Report, runner: ModelRunner, chosen: tuple[Load, ...], num_rounds: int
) -> dict[Load, float]:
    """Tokens/s of each load; if one fails among the others, each that works alone."""
    together = report.add("steps", lambda: rates_of(runner, num_rounds, chosen))
    if together is not None:
        return together
    rates: dict[Load, float] = {}
    for load in chosen:
        alone = report.add(load.name, partial(rates_of, runner, num_rounds, (load,)))
        rates |= alone or {}
    return rates


def rates_of(runner: ModelRunner, num_rounds: int, chosen: tuple[Load, ...]) -> dict[Load, float]:
    """Medians over the rounds."""
    rounds = measure([runner], num_rounds, chosen)
    return {load: statistics.median(own) for load, (own,) in zip(chosen, rounds, strict=True)}


def run(report: Report, model: Path, chosen: tuple[Load, ...], num_rounds: int) -> None:
    """All figures of one model."""
    peak = report.add("peaks", lambda: peak_of(DEVICE))
    runner = report.add("the load of the model", lambda: engine_on(model))
    if runner is None:
        return
    report.figures["form"] = runner.operators.name
    rates = steps(report, runner, chosen, num_rounds)
    if peak is not None:
        report.figures["peak"] = asdict(peak)
        rows = rows_of(tuple(rates), list(rates.values()), read_config(model), peak)
        report.figures["steps"] = rows
    block_bytes = runner.spec.layout.block_bytes
    moves = report.add("tier moves", lambda: tier_moves(block_bytes))
    report.figures["tier_moves"] = moves or {}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="Hugging Face directory")
    parser.add_argument("--shape", choices=SHAPES, default="1b", help="of the random model")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--prompts", default="512,2048")
    parser.add_argument("--context", type=int, default=512, help="tokens before a decode step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checks", type=int, default=0, help="exit status of the tests before")
    options = parser.parse_args()
    batches, prompts = (
        [int(size) for size in sizes.split(",")] for sizes in (options.batches, options.prompts)
    )
    report = Report(options.checks)
    chosen = loads(batches, prompts, options.context)
    with tempfile.TemporaryDirectory(prefix="pointsman-gpu-") as directory:
        model = options.model or random_model(options.shape, Path(directory))
        run(report, model, chosen, options.rounds)
    sys.stdout.write(json.dumps({**report.figures, "errors": report.errors}) + "\n")
    return ENDED_WITH_ERRORS if report.errors else 0


if __name__ == "__main__":
    sys.exit(main())
