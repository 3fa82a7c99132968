"""An engine driven by hand, without scheduler, cache or queue: for measuring it and testing it.

`python -m workers.models.bench --model DIR [--dtype bfloat16] [--threads 1]` prints tokens/s.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from workers.model import ByteArray, Float32Array, Int64Array, ModelRunner, StepBatch
from workers.models.load import load_runner

_PROMPT_TOKENS = 512
_NUM_STEPS = 16


@dataclass(slots=True)
class Lane:
    """A sequence, the blocks it lies in, and how many of its tokens have KV."""

    tokens: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    num_computed: int = 0


class EngineBench:
    """An engine with a pool of blocks, dealt out in a random order that `seed` decides.

    Binds the engine's pool: of several benches on one engine only the latest may step.
    """

    def __init__(self, runner: ModelRunner, num_blocks: int = 64, seed: int = 1) -> None:
        self.runner = runner
        layout = runner.spec.layout
        self.pool: ByteArray = np.zeros((num_blocks, layout.block_bytes), dtype=np.uint8)
        self._free: list[int] = np.random.default_rng(seed).permutation(num_blocks).tolist()
        runner.bind_pool(self.pool)
        runner.warm_up()

    def lane(self, prompt: Sequence[int], num_more: int = 0) -> Lane:
        """A sequence with blocks for its prompt and `num_more` tokens; nothing is computed."""
        block_tokens = self.runner.spec.layout.block_tokens
        num_blocks = -(-(len(prompt) + num_more) // block_tokens)
        blocks = [self._free.pop() for _ in range(num_blocks)]
        return Lane(list(prompt), len(prompt), blocks)

    def step(self, lanes: Sequence[Lane], num_tokens: Sequence[int]) -> Float32Array:
        """Compute the next `num_tokens[i]` tokens of each lane; the logits of the last of each."""
        token_ids = [
            token_id
            for lane, count in zip(lanes, num_tokens, strict=True)
            for token_id in lane.tokens[lane.num_computed : lane.num_computed + count]
        ]
        positions = [
            np.arange(lane.num_computed, lane.num_computed + count)
            for lane, count in zip(lanes, num_tokens, strict=True)
        ]
        slots = [self._slots(lane, places) for lane, places in zip(lanes, positions, strict=True)]
        tables = np.zeros((len(lanes), max(len(lane.block_ids) for lane in lanes)), np.int32)
        for row, (lane, count) in enumerate(zip(lanes, num_tokens, strict=True)):
            tables[row, : len(lane.block_ids)] = lane.block_ids
            lane.num_computed += count
        bounds = np.concatenate(([0], np.cumsum(num_tokens))).astype(np.int32)
        return self.runner.forward(
            StepBatch(
                token_ids=np.array(token_ids, np.int64),
                positions=np.concatenate(positions),
                slot_mapping=np.concatenate(slots),
                cu_query_lens=bounds,
                context_lens=np.array([lane.num_computed for lane in lanes], np.int32),
                block_tables=tables,
                logit_rows=bounds[1:].astype(np.int64) - 1,
                histories=[lane.tokens for lane in lanes],
                num_prompt_tokens=[lane.num_prompt_tokens for lane in lanes],
            )
        )

    def generate(self, prompt: Sequence[int], num_tokens: int, chunk_tokens: int = 1000) -> Lane:
        """Greedy tokens after a prompt computed in chunks."""
        lane = self.lane(prompt, num_tokens)
        for _ in range(num_tokens):
            self.catch_up(lane, chunk_tokens)
        return lane

    def catch_up(self, lane: Lane, chunk_tokens: int = 1000) -> Float32Array:
        """Compute all of a lane's tokens, append the greedy next one; the logits it came from."""
        logits = np.empty((1, 0), np.float32)
        while lane.num_computed < len(lane.tokens):
            missing = len(lane.tokens) - lane.num_computed
            logits = self.step([lane], [min(chunk_tokens, missing)])
        last: Float32Array = logits[0]
        lane.tokens.append(int(last.argmax()))
        return last

    def _slots(self, lane: Lane, positions: Int64Array) -> Int64Array:
        block_tokens = self.runner.spec.layout.block_tokens
        blocks = np.array(lane.block_ids, np.int64)[positions // block_tokens]
        slots: Int64Array = blocks * block_tokens + positions % block_tokens
        return slots


def measure(runner: ModelRunner, batch_sizes: Sequence[int]) -> list[tuple[str, float]]:
    """Tokens/s of prefill (best of 3) and of decode after a prompt (median step), by batch size."""
    block_tokens = runner.spec.layout.block_tokens
    lane_tokens = _PROMPT_TOKENS + len(batch_sizes) * _NUM_STEPS
    num_lanes = max(batch_sizes) + 3
    bench = EngineBench(runner, num_lanes * -(-lane_tokens // block_tokens))
    random = np.random.default_rng(0)
    prompt = random.integers(0, runner.spec.vocab_size, lane_tokens).tolist()
    lanes = [bench.lane(prompt) for _ in range(num_lanes)]
    prefill_s = [_step_s(bench, [lane], _PROMPT_TOKENS) for lane in lanes]
    figures = [(f"prefill of {_PROMPT_TOKENS}", _PROMPT_TOKENS / min(prefill_s))]
    for size in batch_sizes:
        steps_s = [_step_s(bench, lanes[:size], 1) for _ in range(_NUM_STEPS)]
        figures.append((f"decode, batch of {size}", size / statistics.median(steps_s)))
    return figures


def _step_s(bench: EngineBench, lanes: Sequence[Lane], num_tokens: int) -> float:
    began_s = time.perf_counter()
    bench.step(lanes, [num_tokens] * len(lanes))
    return time.perf_counter() - began_s


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m workers.models.bench", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    options = parser.parse_args()
    import torch  # noqa: PLC0415  # the test engines are driven without it

    torch.set_num_threads(options.threads)
    for name, tokens_per_s in measure(
        load_runner("torch", options.model, dtype=options.dtype), (1, 8)
    ):
        sys.stdout.write(f"{name}: {tokens_per_s:.1f} tokens/s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
