"""What the CUDA engine does on this GPU: decode, prefill, tier moves. Run it by gpu.sh.

The last line is JSON: tokens/s of decode by batch, GFLOP/s of prefill and their share of the
measured peak, GB/s of tier moves and their share of the measured link. No network is needed: the
model has random weights in a real shape, or is a directory given by --model.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import transformers

from tests.bench.floor import best_s, peak_of, rows_of
from tests.gpu.machine import BLOCK_TOKENS, DEVICE, engine_on
from workers.hbm_pool import HbmPool
from workers.kernels.device_pool import DevicePool
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


def run(model: Path, chosen: tuple[Load, ...], num_rounds: int) -> dict[str, Any]:
    """All figures of one model."""
    config = read_config(model)
    say("measuring the peaks of the device")
    peak = peak_of(DEVICE)
    say("loading the model")
    runner = engine_on(model)
    say("measuring steps")
    rates = [statistics.median(own) for (own,) in measure([runner], num_rounds, chosen)]
    rows = rows_of(chosen, rates, config, peak)
    say("measuring tier moves")
    moves = tier_moves(runner.spec.layout.block_bytes)
    return {
        "device": device_name(),
        "form": runner.operators.name,
        "block_tokens": BLOCK_TOKENS,
        "peak": asdict(peak),
        "steps": rows,
        "tier_moves": moves,
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="Hugging Face directory")
    parser.add_argument("--shape", choices=SHAPES, default="1b", help="of the random model")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--prompts", default="512,2048")
    parser.add_argument("--context", type=int, default=512, help="tokens before a decode step")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    batches, prompts = (
        [int(size) for size in sizes.split(",")] for sizes in (options.batches, options.prompts)
    )
    with tempfile.TemporaryDirectory(prefix="pointsman-gpu-") as directory:
        model = options.model or random_model(options.shape, Path(directory))
        result = run(model, loads(batches, prompts, options.context), options.rounds)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
