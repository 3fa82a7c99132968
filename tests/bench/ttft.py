"""Time to the first token of a long prompt: computed, or its blocks from DRAM, or from NVMe.

`python tests/bench/ttft.py [--json]`: one run, the three in turns, on the real model. The last line is
{"dram": TTFT from DRAM over computed, "nvme": the same from NVMe, ...}. Fails above 1/10 and 1/5, or
if a token differs. Shared machines: believe the ratios, not the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.scheduling.transfer_cost import LoadPolicy
from tests.bench.tier_rig import CACHE, Daemon, TierEngine, random_tokens, real_model, use_threads
from workers.settings import EngineSettings

PROMPT_TOKENS = 1500
NUM_TOKENS = 4
MOST = {"dram": 0.1, "nvme": 0.2}
SOURCES = ("computed", "dram", "nvme")


def first_token_s(bench: TierEngine, name: str, prompt: list[int]) -> float:
    """Seconds from the request to its first token."""
    began_s = time.perf_counter()
    bench.submit(name, prompt, NUM_TOKENS)
    bench.wait(name)
    bench.wait_at_rest()
    return bench.sink.first_s[name] - began_s


def run(model: Path, folder: Path, dtype: str, num_rounds: int) -> dict[str, list[float]]:
    """TTFT by source, a value a round; the daemon restarts before each reading from its disk."""
    daemon = Daemon(folder, dram_bytes=512 << 20, nvme_bytes=1 << 30)
    settings = EngineSettings(num_blocks=160, prefix_cache=False)
    bench = TierEngine(model, daemon, settings, dtype, LoadPolicy.ALWAYS)
    times: dict[str, list[float]] = {source: [] for source in SOURCES}
    try:
        first_token_s(bench, "warm up", random_tokens(999, 64))
        for number in range(num_rounds):
            prompt = random_tokens(number, PROMPT_TOKENS)
            for source in SOURCES:
                if source == "nvme":
                    daemon.end()
                    daemon.start(bench.block_bytes)
                    # The engine finds the new daemon and maps its memory: not what is measured.
                    first_token_s(bench, f"{number} greeting", random_tokens(5000 + number, 40))
                name = f"{number} {source}"
                times[source].append(first_token_s(bench, name, prompt))
    finally:
        bench.stop()
    for number in range(num_rounds):
        outputs = {tuple(bench.sink.tokens[f"{number} {source}"]) for source in SOURCES}
        if len(outputs) != 1:
            raise SystemExit("the tokens depend on where the blocks came from")
    return times


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    use_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        times = run(real_model(), Path(folder), options.dtype, options.rounds)
    middle = {source: statistics.median(values) for source, values in times.items()}
    for source, seconds in middle.items() if not options.json else []:
        sys.stdout.write(f"{source:>9} {seconds * 1000:9.1f} ms\n")
    ratios = {source: round(middle[source] / middle["computed"], 4) for source in MOST}
    sys.stdout.write(json.dumps({"ratios": ratios, "prompt_tokens": PROMPT_TOKENS}) + "\n")
    return int(any(ratios[source] > most for source, most in MOST.items()))


if __name__ == "__main__":
    raise SystemExit(main())
