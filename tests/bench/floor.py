"""How near the engine comes to what the machine could do at most.

`python tests/bench/floor.py [--threads 2] [--rounds 5] [--json]`. For each kind of step: the bytes
that it must read and the products that it must compute, the time that the measured memory bandwidth
(of a buffer as large as the weights) and bfloat16 products per second leave it at least (the slower
of the two), and the share of that in the time that it takes. All of it is measured in one run; the
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from workers.kernels.native import NativeOperators
from workers.models.bench import Load, measure
from workers.models.convert import convert, packaged_gguf
from workers.models.families import DecoderConfig, read_config
from workers.models.load import load_runner
from workers.models.operator_choice import why_not_here

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pointsman-bench"
CONTEXT_TOKENS = 512
LOADS = (
    *(Load(f"decode, batch of {size}", size, CONTEXT_TOKENS, 1) for size in (1, 8, 32, 64)),
    *(Load(f"prefill of {size}", 1, 0, size) for size in (512, 2048)),
)
READ_BYTES = 1 << 28  # as much as the weights: what the last cache keeps of them, it keeps of this
PRODUCT_SIDES = (1024, 2048)
SECONDS_PER_PEAK = 1.0
VALUE_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Peak:
    """What the machine reads and computes at most, measured."""

    bytes_per_s: float
    flops_per_s: float

    def or_better(self, other: Peak) -> Peak:
        """The best of two measurements: others may use the machine during one of them."""
        return Peak(
            max(self.bytes_per_s, other.bytes_per_s), max(self.flops_per_s, other.flops_per_s)
        )


@dataclass(frozen=True)
class Cost:
    """Of one step: `num_bytes` of weights and KV that it reads, `flops` of its products."""

    num_bytes: int
    flops: int

    def floor_s(self, peak: Peak) -> float:
        """No step is shorter."""
        return max(self.num_bytes / peak.bytes_per_s, self.flops / peak.flops_per_s)

    def bound(self, peak: Peak) -> str:
        """What the floor is made of."""
        is_memory = self.num_bytes / peak.bytes_per_s > self.flops / peak.flops_per_s
        return "memory" if is_memory else "products"


def cost_of(load: Load, config: DecoderConfig) -> Cost:
    """One step of the load; each lane wants the logits of its last token."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer_weights = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
    weights = config.num_layers * layer_weights
    head = config.vocab_size * config.hidden_size
    num_rows = load.num_lanes * load.num_tokens
    # Row i of a lane sees the context before the step, and i + 1 tokens of the step.
    seen = load.context_tokens * load.num_tokens + load.num_tokens * (load.num_tokens + 1) // 2
    kv_tokens = load.num_lanes * (load.context_tokens + load.num_tokens)
    return Cost(
        num_bytes=VALUE_BYTES * (weights + head + config.num_layers * kv_tokens * 2 * kv_heads),
        flops=2 * weights * num_rows
        + 2 * head * load.num_lanes
        + 4 * config.num_layers * heads * seen * load.num_lanes,
    )


def peak_of(device: torch.device) -> Peak:
    """The best of several operators and of some seconds."""
    read_s = min(best_s(reader, device) for reader in readers_of(device))
    flops_per_s = 0.0
    for side in PRODUCT_SIDES if device.type == "cpu" else (4096, 8192):
        left, right = torch.randn(2, side, side, device=device).bfloat16()
        seconds = best_s(partial(torch.matmul, left, right), device)
        flops_per_s = max(flops_per_s, 2 * side**3 / seconds)
    return Peak(READ_BYTES / read_s, flops_per_s)


def readers_of(device: torch.device) -> list[Callable[[], object]]:
    """Operators that read READ_BYTES and do next to nothing else.

    The native product of one row is among them: it reads faster than torch's sums, and a floor that
    a step falls below is none.
    """
    # numpy's memory lies in huge pages, as weights and KV do.
    values = torch.from_numpy(np.ones(READ_BYTES // 4, dtype=np.float32))
    source = values.to(device)
    readers: list[Callable[[], object]] = [source.sum, source.amax]
    if device.type == "cpu" and why_not_here() is None:
        weight = torch.ones(READ_BYTES // VALUE_BYTES // 1024, 1024, dtype=torch.bfloat16)
        linear = NativeOperators().linear(weight)
        row, out = torch.ones(1, 1024, dtype=torch.bfloat16), torch.empty(1, len(weight))
        readers.append(partial(linear, row, out))
    return readers


def best_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest run of those that fit into a second."""
    fastest = float("inf")
    ends_s = time.perf_counter() + SECONDS_PER_PEAK
    while time.perf_counter() < ends_s:
        began_s = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - began_s)
    return fastest


def rows_of(
    loads: tuple[Load, ...], rates: list[float], config: DecoderConfig, peak: Peak
) -> list[dict[str, str | float]]:
    """What is printed, load by load; `rates` in tokens/s."""
    rows: list[dict[str, str | float]] = []
    for load, rate in zip(loads, rates, strict=True):
        cost, step_s = cost_of(load, config), load.tokens_per_step / rate
        rows.append(
            {
                "load": load.name,
                "tokens_per_s": round(rate, 1),
                "step_ms": round(1e3 * step_s, 2),
                "floor_ms": round(1e3 * cost.floor_s(peak), 2),
                "percent_of_floor": round(100 * cost.floor_s(peak) / step_s, 1),
                "percent_of_peak": round(100 * cost.flops / step_s / peak.flops_per_s, 2),
                "bound": cost.bound(peak),
                "gb_per_s": round(cost.num_bytes / step_s / 1e9, 1),
                "gflops_per_s": round(cost.flops / step_s / 1e9, 1),
            }
        )
    return rows


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="Hugging Face directory; default: SmolLM2-135M")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5, help="medians are taken over these")
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = options.model
    if model is None:
        model = CACHE / "smollm2"
        CACHE.mkdir(parents=True, exist_ok=True)
        convert(packaged_gguf(), model, lambda *_: None)
    before = peak_of(torch.device("cpu"))
    runner = load_runner("torch", model, dtype="auto")
    rates = [statistics.median(own) for (own,) in measure([runner], options.rounds, LOADS)]
    peak = before.or_better(peak_of(torch.device("cpu")))
    rows = rows_of(LOADS, rates, read_config(model), peak)
    for row in rows if not options.json else []:
        sys.stdout.write(", ".join(f"{name} {value}" for name, value in row.items()) + "\n")
    result = {"load": os.getloadavg()[0], "threads": options.threads, "peak": asdict(peak)}
    sys.stdout.write(json.dumps({**result, "steps": rows}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
