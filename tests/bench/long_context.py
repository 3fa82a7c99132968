"""One context with four times the KV of the HBM pool, against a pool that holds all of it.

`python tests/bench/long_context.py [--json]`: the real model in float32, both engines in turns, so that
what else runs on the machine hits them alike. Each round is a new prompt, and an answer to it.

The last line is {"ratios": {"prefill": tokens per second over those of the pool that holds all,
"decode": ...}, ...}. Fails if a token differs. Shared machines: believe the ratios, not the figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.tier_rig import CACHE, Daemon, TierEngine, random_tokens, real_model, use_threads
from workers.settings import EngineSettings

BLOCK_TOKENS = 16
BLOCK_BYTES = 720 << 10
STEP_TOKENS = 128


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=3000)
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    use_threads(options.threads)
    num_blocks = (options.prompt_tokens + options.output_tokens) // BLOCK_TOKENS
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        daemon = Daemon(Path(folder), 4 * num_blocks * BLOCK_BYTES, 0)
        engines = {
            "long": TierEngine(real_model(), daemon, settings(num_blocks // 4)),
            "whole": TierEngine(real_model(), None, settings(num_blocks + 16)),
        }
        seconds = {form: {"prefill": 0.0, "decode": 0.0} for form in engines}
        for number in range(options.rounds):
            prompt = random_tokens(number, options.prompt_tokens)
            for form, bench in engines.items():
                play(bench, str(number), prompt, options.output_tokens, seconds[form])
        said = [bench.sink.tokens for bench in engines.values()]
        for bench in engines.values():
            bench.stop()
    if said[0] != said[1]:
        raise SystemExit("the tokens depend on where the blocks lie")
    counts = {"prefill": options.prompt_tokens, "decode": options.output_tokens - 1}
    for form, took in seconds.items() if not options.json else []:
        rates = {kind: options.rounds * counts[kind] / took[kind] for kind in counts}
        sys.stdout.write(
            f"{form:>6} " + ", ".join(f"{k} {v:.1f} tokens/s" for k, v in rates.items())
        )
        sys.stdout.write("\n")
    ratios = {k: round(seconds["whole"][k] / seconds["long"][k], 3) for k in counts}
    line = {"ratios": ratios, "kv_blocks": num_blocks, "pool_blocks": num_blocks // 4}
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


def settings(num_blocks: int) -> EngineSettings:
    """Steps of the same size, and nothing found from before."""
    return EngineSettings(num_blocks=num_blocks, max_batch_tokens=STEP_TOKENS)


def play(
    bench: TierEngine, name: str, prompt: list[int], num_tokens: int, seconds: dict[str, float]
) -> None:
    """One request; its time to the first token and from there to its end is added."""
    began_s = time.perf_counter()
    bench.submit(name, prompt, num_tokens)
    bench.wait(name)
    ended_s = time.perf_counter()
    first_s = bench.sink.first_s[name]
    seconds["prefill"] += first_s - began_s
    seconds["decode"] += ended_s - first_s
    bench.wait_at_rest()


if __name__ == "__main__":
    raise SystemExit(main())
