"""One context with four times the KV of the HBM pool, against a pool that holds all of it.

`python tests/bench/long_context.py [--json]`: the real model, both engines in turns, so that
what else runs on the machine hits them alike. Each round is a new prompt, and an answer to it.

The last line is {"ratios": {"prefill": tokens per second over those of the pool that holds all, in the
median round, "decode": ...}, ...}. Fails if a token differs. Shared machines: believe the ratios.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.tier_rig import CACHE, Daemon, TierEngine, random_tokens, real_model, use_threads
from workers.settings import EngineSettings

BLOCK_TOKENS = 16
BLOCK_BYTES = 720 << 10
STEP_TOKENS = 64  # fits into the window often, as steps do into that of a pool of some size


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--output-tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--dtype", default="auto", help="bfloat16 with native operators, where they run; float32"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    use_threads(options.threads)
    num_blocks = (options.prompt_tokens + options.output_tokens) // BLOCK_TOKENS
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        daemon = Daemon(Path(folder), 4 * num_blocks * BLOCK_BYTES, 0)
        engines = {
            "long": TierEngine(real_model(), daemon, settings(num_blocks // 4), options.dtype),
            "whole": TierEngine(real_model(), None, settings(num_blocks + 16), options.dtype),
        }
        seconds: dict[str, list[tuple[float, float]]] = {form: [] for form in engines}
        order = list(engines)
        for number in range(options.rounds):
            prompt = random_tokens(number, options.prompt_tokens)
            order.reverse()
            for form in order:
                took = play(engines[form], str(number), prompt, options.output_tokens)
                seconds[form].append(took)
        said = [bench.sink.tokens for bench in engines.values()]
        for bench in engines.values():
            bench.stop()
    if said[0] != said[1]:
        raise SystemExit("the tokens depend on where the blocks lie")
    counts = (options.prompt_tokens, options.output_tokens - 1)
    for form, took in seconds.items() if not options.json else []:
        prefill, decode = (
            median(count / each for each in parts)
            for count, parts in zip(counts, zip(*took, strict=True), strict=True)
        )
        sys.stdout.write(f"{form:>6} prefill {prefill:.1f}, decode {decode:.1f} tokens/s\n")
    ratios = {
        kind: round(
            median(w[n] / x[n] for w, x in zip(seconds["whole"], seconds["long"], strict=True)), 3
        )
        for n, kind in enumerate(("prefill", "decode"))
    }
    line = {"ratios": ratios, "kv_blocks": num_blocks, "pool_blocks": num_blocks // 4}
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


def settings(num_blocks: int) -> EngineSettings:
    """Steps of the same size, and nothing found from before."""
    return EngineSettings(num_blocks=num_blocks, max_batch_tokens=STEP_TOKENS)


def play(bench: TierEngine, name: str, prompt: list[int], num_tokens: int) -> tuple[float, float]:
    """One request: seconds to its first token, and from there to its end."""
    began_s = time.perf_counter()
    bench.submit(name, prompt, num_tokens)
    bench.wait(name)
    ended_s = time.perf_counter()
    bench.wait_at_rest()
    first_s = bench.sink.first_s[name]
    return first_s - began_s, ended_s - first_s


if __name__ == "__main__":
    raise SystemExit(main())
