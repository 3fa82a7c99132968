"""What each option of sampling costs: 64 rows of 49,152 logits, all options in turns in one run.

`python tests/bench/sampling.py [--rows 64] [--rounds 15]`: CPU milliseconds of one step, and what
63 plain rows cost when one row has the option.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.protocol.sampling import SamplingParams  # found by the line above
from tiering.block_layout import BlockLayout
from workers.logit_rules import rules_for
from workers.model import ModelSpec
from workers.sampling import SampleRow, sample
from workers.sequence import Sequence

VOCAB = 49_152
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, repetition_penalty": {"repetition_penalty": 1.1},
    "greedy, presence and frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "greedy, logit_bias of 50": {"logit_bias": tuple((rank * 7, 1.0) for rank in range(50))},
    "greedy, min_tokens": {"min_tokens": 500},
    "greedy, 20 bad_words": {"bad_words": tuple((rank, rank + 1, rank + 2) for rank in range(20))},
    "greedy, all of these": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "logit_bias": tuple((rank * 7, 1.0) for rank in range(50)),
        "min_tokens": 500,
        "bad_words": tuple((rank, rank + 1, rank + 2) for rank in range(20)),
    },
    "greedy, logprobs 5": {"num_logprobs": 5},
    "temperature": {"temperature": 1.0},
    "temperature, min_p": {"temperature": 1.0, "min_p": 0.05},
    "temperature, penalties": {"temperature": 1.0, "presence_penalty": 0.5},
    "top_k 40": {"temperature": 1.0, "top_k": 40},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top_p 0.9, min_p": {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05},
}
SPEC = ModelSpec(BlockLayout(1, 16, 1, 8, "uint8"), VOCAB, 8192, frozenset({2}), b"")


def sample_row(rank: int, fields: dict[str, Any]) -> SampleRow:
    """A row of a sequence with a prompt and output of its own."""
    tokens = np.random.default_rng(rank).integers(0, VOCAB, PROMPT_TOKENS + OUTPUT_TOKENS).tolist()
    sampling = SamplingParams(**{"max_tokens": 999, "temperature": 0.0, "seed": rank} | fields)
    sequence = Sequence(str(rank), 1, tokens, PROMPT_TOKENS, sampling, b"")
    return SampleRow(sampling, OUTPUT_TOKENS, rules_for(sequence, SPEC))


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    # A real model's logits have a few likely tokens and a long tail.
    logits = np.random.default_rng(0).gumbel(0, 2, (options.rows, VOCAB)).astype(np.float32)
    plain = [sample_row(rank, {}) for rank in range(options.rows)]
    steps = {}
    for name, fields in OPTIONS.items():
        all_rows = [sample_row(rank, fields) for rank in range(options.rows)]
        steps[name] = (all_rows, [all_rows[0], *plain[1:]])
    times_ms: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in steps}
    for _ in range(options.rounds):
        for name, kinds in steps.items():
            for rows, some in zip(kinds, times_ms[name], strict=True):
                began_s = time.thread_time()
                sample(logits, rows)
                some.append(1000 * (time.thread_time() - began_s))
    base_ms = statistics.median(times_ms["greedy"][0])
    sys.stdout.write(
        f"{'':32} {'all rows':>10} {'one row':>10}   ms, medians; greedy {base_ms:.2f}\n"
    )
    for name, (every, one) in times_ms.items():
        sys.stdout.write(
            f"{name:32} {statistics.median(every):10.2f} {statistics.median(one):10.2f}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
