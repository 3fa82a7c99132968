"""Sessions with four times the HBM pool of KV: tiers against a pool that holds all, and no tiers.

`python tests/bench/sessions.py [--json]`: one run on the real model in float32, the three engines in
turns of a few seconds, so that what else runs on the machine hits them alike. Each of the sessions
comes back turn after turn with its whole history and some new tokens.

tiers     a pool of a fourth of the KV, DRAM and NVMe below it hold the rest
whole     a pool that holds all
without   the small pool alone: what it evicted is computed again

The last line is {"ratios": {"tiers": throughput over that of whole, "without": ...}, ...}. Fails below
0.85, or if a token differs. Shared machines: believe the ratios, not the figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.tier_rig import CACHE, Daemon, TierEngine, random_tokens, real_model, use_threads
from workers.settings import EngineSettings

BLOCK_TOKENS = 16
NEW_TOKENS, OUTPUT_TOKENS = 40, 24
CONCURRENCY = 2
GROUP = 4  # sessions that an engine plays before the next engine has its turn
LEAST_RATIO = 0.85


def play_turn(bench: TierEngine, turn: int, histories: list[list[int]], numbers: range) -> float:
    """One turn of some sessions, a few at once; the seconds it took. Histories grow."""
    began_s = time.perf_counter()
    running: dict[str, int] = {}
    for number in numbers:
        history = histories[number]
        if len(running) == CONCURRENCY:
            settle(bench, running, histories)
        history.extend(random_tokens(1000 * turn + number, NEW_TOKENS))
        name = f"{turn}.{number}"
        running[name] = number
        bench.submit(name, history, OUTPUT_TOKENS)
    while running:
        settle(bench, running, histories)
    bench.wait_at_rest()  # what is stored behind the answers is not another engine's cost
    return time.perf_counter() - began_s


def settle(bench: TierEngine, running: dict[str, int], histories: list[list[int]]) -> None:
    """Wait for one that ends, and let those that ended remember what was said."""
    bench.wait(*running, any_of=True)
    for name in [name for name in running if name in bench.sink.ended]:
        histories[running.pop(name)].extend(bench.sink.tokens[name])


def play(
    model: Path, folder: Path, num_sessions: int, num_turns: int
) -> tuple[dict[str, float], dict[str, TierEngine], int]:
    """Seconds by form, the engines after it, and blocks of KV in all."""
    session_blocks = num_turns * (NEW_TOKENS + OUTPUT_TOKENS) // BLOCK_TOKENS
    num_blocks = num_sessions * session_blocks
    pool = num_blocks // 4
    block_bytes = 720 << 10
    # A third of the KV fits into DRAM: the rest lives on the disk.
    daemon = Daemon(folder, num_blocks // 3 * block_bytes, 2 * num_blocks * block_bytes)
    small = EngineSettings(num_blocks=pool, max_batch_sequences=CONCURRENCY)
    whole = EngineSettings(num_blocks=num_blocks + 16, max_batch_sequences=CONCURRENCY)
    engines = {
        "tiers": TierEngine(model, daemon, small),
        "whole": TierEngine(model, None, whole),
        "without": TierEngine(model, None, small),
    }
    histories = {form: [[] for _ in range(num_sessions)] for form in engines}
    seconds = dict.fromkeys(engines, 0.0)
    for bench in engines.values():
        bench.submit("warm up", random_tokens(999_999, 64), 8)
        bench.wait("warm up")
    order = list(engines)
    for turn, first in itertools.product(range(num_turns), range(0, num_sessions, GROUP)):
        numbers = range(first, min(first + GROUP, num_sessions))
        order.append(order.pop(0))
        for form in order:
            seconds[form] += play_turn(engines[form], turn, histories[form], numbers)
    if len({json.dumps(said) for said in histories.values()}) != 1:
        raise SystemExit("the tokens depend on where the blocks came from")
    return seconds, engines, num_blocks


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="only the last line")
    options = parser.parse_args()
    use_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        seconds, engines, num_blocks = play(
            real_model(), Path(folder), options.sessions, options.turns
        )
        stats = {form: bench.engine.stats() for form, bench in engines.items()}
        for bench in engines.values():
            bench.stop()
    num_tokens = options.sessions * options.turns * (NEW_TOKENS + OUTPUT_TOKENS)
    for form, each in stats.items() if not options.json else []:
        sys.stdout.write(
            f"{form:>8} {num_tokens / seconds[form]:8.1f} tokens/s, pool of {each.total_blocks}, "
            f"{each.num_prefill_tokens} prompt tokens computed, loads {each.mover.load_reasons} "
            f"in {each.mover.load_busy_s:.2f} s, of these {each.mover.promotion_s:.2f} for NVMe, "
            f"stores in {each.mover.store_busy_s:.2f} s\n"
        )
    ratios = {form: round(seconds["whole"] / seconds[form], 3) for form in ("tiers", "without")}
    line = {
        "ratios": ratios,
        "kv_blocks": num_blocks,
        "pool_blocks": stats["tiers"].total_blocks,
        "nvme_bytes": stats["tiers"].mover.num_promoted_bytes,
    }
    sys.stdout.write(json.dumps(line) + "\n")
    return int(ratios["tiers"] < LEAST_RATIO)


if __name__ == "__main__":
    raise SystemExit(main())
