"""An engine driven by hand, without scheduler, cache or queue: for measuring it and testing it.

`python -m workers.models.bench --model DIR [--forms auto,float32] [--threads 1]` prints tokens/s.
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

from workers.hbm_pool import ByteArray, HostPool
from workers.model import Float32Array, Int64Array, ModelRunner, StepBatch
from workers.models.load import load_runner

FORMS = ("auto", "int8", "bfloat16", "float32", "reference-bfloat16")
_STEPS_PER_ROUND = 5  # of decode


@dataclass(slots=True)
class Lane:
    """A sequence, the blocks it lies in, and how many of its tokens have KV."""

    tokens: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    num_computed: int = 0


class EngineBench:
    """An engine with a pool of blocks, dealt out in a random order that `seed` decides.

    Makes the engine's pool: of several benches on one engine only the latest may step.
    """

    def __init__(self, runner: ModelRunner, num_blocks: int = 64, seed: int = 1) -> None:
        self.runner = runner
        self.hbm = runner.make_pool(num_blocks)
        self._free: list[int] = np.random.default_rng(seed).permutation(num_blocks).tolist()
        runner.warm_up(1)

    @property
    def pool(self) -> ByteArray:
        """The blocks of an engine on the host, (num_blocks, block_bytes), the engine's own memory.

        Raises:
            TypeError: they lie elsewhere; `hbm` reads and writes them.
        """
        if not isinstance(self.hbm, HostPool):
            raise TypeError(f"the pool is no host memory: {self.hbm}")
        return self.hbm.blocks

    def lane(self, prompt: Sequence[int], num_more: int = 0) -> Lane:
        """A sequence with blocks for its prompt and `num_more` tokens; nothing is computed."""
        block_tokens = self.runner.spec.layout.block_tokens
        num_blocks = -(-(len(prompt) + num_more) // block_tokens)
        blocks = [self._free.pop() for _ in range(num_blocks)]
        return Lane(list(prompt), len(prompt), blocks)

    def step(self, lanes: Sequence[Lane], num_tokens: Sequence[int]) -> Float32Array:
        """Compute the next `num_tokens[i]` tokens of each lane; the logits of the last of each."""
        return self._step(lanes, num_tokens, np.cumsum(num_tokens) - 1)

    def step_all(self, lane: Lane, num_tokens: int) -> Float32Array:
        """Compute the next tokens of one lane; the logits of each."""
        return self._step([lane], [num_tokens], np.arange(num_tokens))

    def _step(
        self, lanes: Sequence[Lane], num_tokens: Sequence[int], logit_rows: Int64Array
    ) -> Float32Array:
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
                logit_rows=logit_rows,
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


@dataclass(frozen=True, slots=True)
class Load:
    """One kind of step: `num_lanes` sequences, each computing `num_tokens` after `context_tokens`."""

    name: str
    num_lanes: int
    context_tokens: int
    num_tokens: int

    @property
    def tokens_per_step(self) -> int:
        """All lanes together."""
        return self.num_lanes * self.num_tokens


LOADS = (
    Load("prefill of 512", 1, 0, 512),
    Load("prefill of 2048", 1, 0, 2048),
    Load("decode, batch of 1", 1, 512, 1),
    Load("decode, batch of 8", 8, 512, 1),
    Load("decode, batch of 32", 32, 512, 1),
)


def measure(
    runners: Sequence[ModelRunner], num_rounds: int, loads: Sequence[Load] = LOADS
) -> list[list[list[float]]]:
    """Tokens/s by load, runner and round; runners take turns within a round."""
    benches = [_LoadedBench(runner, loads) for runner in runners]
    figures: list[list[list[float]]] = [[[] for _ in runners] for _ in loads]
    for _ in range(num_rounds):
        for load, of_load in zip(loads, figures, strict=True):
            for bench, of_runner in zip(benches, of_load, strict=True):
                of_runner.append(bench.tokens_per_s(load))
    return figures


class _LoadedBench:
    """A runner whose lanes are always ready for any load, because steps are undone."""

    def __init__(self, runner: ModelRunner, loads: Sequence[Load]) -> None:
        longest = max(load.context_tokens + load.num_tokens for load in loads)
        decoding = [load for load in loads if load.context_tokens]
        num_lanes = max((load.num_lanes for load in decoding), default=0)
        lane_tokens = max((load.context_tokens for load in decoding), default=0) + 1
        block_tokens = runner.spec.layout.block_tokens
        num_blocks = -(-longest // block_tokens) + num_lanes * -(-lane_tokens // block_tokens)
        self._bench = EngineBench(runner, num_blocks)
        prompt = np.random.default_rng(0).integers(0, runner.spec.vocab_size, longest).tolist()
        self._long = self._bench.lane(prompt)
        self._decoding = [self._bench.lane(prompt[: lane_tokens - 1], 1) for _ in range(num_lanes)]
        for lane in self._decoding:
            self._bench.step([lane], [lane_tokens - 1])
            lane.tokens.append(prompt[lane_tokens - 1])

    def tokens_per_s(self, load: Load) -> float:
        """Of the fastest of some steps: others may share the machine."""
        lanes = self._decoding[: load.num_lanes] if load.context_tokens else [self._long]
        repeats = max(1, _STEPS_PER_ROUND // load.num_tokens)
        return load.tokens_per_step / min(self._step_s(load, lanes) for _ in range(repeats))

    def _step_s(self, load: Load, lanes: Sequence[Lane]) -> float:
        for lane in lanes:
            lane.num_computed = load.context_tokens
        began_s = time.perf_counter()
        self._bench.step(lanes, [load.num_tokens] * len(lanes))
        return time.perf_counter() - began_s


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m workers.models.bench", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--forms", default="auto", help=f"of {', '.join(FORMS)}, with commas")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--rounds", type=int, default=5, help="medians are taken over these")
    options = parser.parse_args()
    import torch  # noqa: PLC0415  # the test engines are driven without it

    torch.set_num_threads(options.threads)
    forms = options.forms.split(",")
    runners = [runner_of(form, options.model) for form in forms]
    for load, of_load in zip(LOADS, measure(runners, options.rounds), strict=True):
        medians = [statistics.median(rounds) for rounds in of_load]
        shown = ", ".join(
            f"{form} {median:.1f} ({medians[0] / median:.2f} x)"
            for form, median in zip(forms, medians, strict=True)
        )
        sys.stdout.write(f"{load.name}, tokens/s (first over it): {shown}\n")
    return 0


def runner_of(form: str, model: Path) -> ModelRunner:
    """An engine of one of FORMS."""
    from workers.kernels.reference import ReferenceOperators  # noqa: PLC0415  # loads torch
    from workers.models.torch_runner import TorchRunner  # noqa: PLC0415

    if form == "reference-bfloat16":
        import torch  # noqa: PLC0415

        return TorchRunner(model, operators=ReferenceOperators(torch.bfloat16))
    return load_runner("torch", model, dtype=form)


if __name__ == "__main__":
    sys.exit(main())
