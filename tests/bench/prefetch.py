"""Time to the first token of requests that wait for a place, their prefixes on NVMe: with prefetch and without.

`python tests/bench/prefetch.py [--places 1 2] [--rounds 5] [--json]`: one run on the real model, two
engines that take turns, one of which drops what it is asked to prefetch. In each round the daemon
starts anew, so that all blocks lie on the disk, and all requests come at once; those that get a place at
once do not count. The last line has, by number of places, the median of the rounds' ratios: mean TTFT
with prefetch over that without. Shared machines: believe the ratios, not the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.scheduling.transfer_cost import LoadPolicy
from tests.bench.tier_rig import CACHE, Daemon, TierEngine, random_tokens, real_model, use_threads
from workers.kv_jobs import PrefetchJob
from workers.kv_mover import KvdMover
from workers.settings import EngineSettings

PROMPT_TOKENS, BLOCK_TOKENS = 1500, 16
FORMS = ("without", "with")


class KvdMoverWithoutPrefetch(KvdMover):
    """Nothing is fetched before its turn."""

    def prefetch(self, job: PrefetchJob) -> None:
        """Dropped."""


MOVERS = {"without": KvdMoverWithoutPrefetch, "with": KvdMover}


@dataclass
class Contender:
    """An engine of one form, and what it took: mean TTFT of those that waited, by round."""

    form: str
    bench: TierEngine
    daemon: Daemon
    ttft_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)


def play(each: Contender, name: str, prompts: list[list[int]], places: int, length: int) -> None:
    """All requests at once, their blocks on the disk alone."""
    each.daemon.end()
    each.daemon.start(each.bench.block_bytes)
    # The engine finds the new daemon and maps its memory: not what is measured.
    each.bench.submit(f"{name} greeting", random_tokens(9999, 40), 1)
    each.bench.wait(f"{name} greeting")
    each.bench.wait_at_rest()
    names = [f"{name} {number}" for number in range(len(prompts))]
    began_s = time.perf_counter()
    for request, prompt in zip(names, prompts, strict=True):
        each.bench.submit(request, prompt, length)
    each.bench.wait(*names)
    each.wall_s.append(time.perf_counter() - began_s)
    each.bench.wait_at_rest()
    waited = [each.bench.sink.first_s[request] - began_s for request in names[places:]]
    each.ttft_s.append(statistics.mean(waited))


def enter(form: str, model: Path, folder: Path, places: int, dtype: str) -> Contender:
    """An engine with so many places, and a daemon of its own."""
    own = folder / f"{form}-{places}"
    own.mkdir()
    daemon = Daemon(own, dram_bytes=640 << 20, nvme_bytes=1 << 30)
    num_blocks = (PROMPT_TOKENS // BLOCK_TOKENS + 4) * places + 16
    settings = EngineSettings(num_blocks=num_blocks, max_batch_sequences=places, prefix_cache=False)
    bench = TierEngine(model, daemon, settings, dtype, LoadPolicy.ALWAYS, MOVERS[form])
    return Contender(form, bench, daemon)


def fill(each: Contender, prompts: list[list[int]]) -> None:
    """Have its tiers hold the prompts' blocks."""
    for number, prompt in enumerate(prompts):
        each.bench.submit(f"fill {number}", prompt, 1)
        each.bench.wait(f"fill {number}")
    each.bench.wait_at_rest()


def tell(each: Contender, places: int) -> None:
    """One line."""
    mover = each.bench.engine.stats().mover
    sys.stdout.write(
        f"{places} places, {each.form:>7} prefetch: TTFT of those that waited "
        f"{statistics.median(each.ttft_s) * 1000:.0f} ms (best {min(each.ttft_s) * 1000:.0f}), "
        f"all done in {statistics.median(each.wall_s):.2f} s; {mover.num_prefetched_blocks} blocks "
        f"prefetched, loads {mover.load_busy_s:.2f} s, {mover.promotion_s:.2f} of these for NVMe\n"
    )


def compare(model: Path, folder: Path, places: int, options: argparse.Namespace) -> float:
    """Both forms in turns; the median ratio."""
    prompts = [random_tokens(number, PROMPT_TOKENS) for number in range(options.requests)]
    contenders = [enter(form, model, folder, places, options.dtype) for form in FORMS]
    try:
        for each in contenders:
            fill(each, prompts)
        for number in range(options.rounds):
            for each in contenders if number % 2 else reversed(contenders):
                play(each, f"round {number}", prompts, places, options.tokens)
        for each in contenders if not options.json else []:
            tell(each, places)
    finally:
        for each in contenders:
            each.bench.stop()
    said = [
        [each.bench.sink.tokens[f"round 0 {number}"] for number in range(len(prompts))]
        for each in contenders
    ]
    if said[0] != said[1]:
        raise SystemExit("the tokens depend on where the blocks came from")
    without, with_it = contenders
    return statistics.median(a / b for a, b in zip(with_it.ttft_s, without.ttft_s, strict=True))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--places", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    use_threads(options.threads)
    ratios: dict[int, float] = {}
    for places in options.places:
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            ratios[places] = round(compare(real_model(), Path(folder), places, options), 3)
    sys.stdout.write(json.dumps({"ratios": ratios, "prompt_tokens": PROMPT_TOKENS}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
