"""Two workers of one thread against one of two: 32 streams through the whole pipeline.

`python tests/bench/roles.py [--streams 32] [--tokens 64] [--rounds 3] [--forms F,G] [--json]`. Three ways
to use two cores, each behind a gateway, Redis and kvd of its own, take turns:

both       one worker for both roles, chunks of prompts sized beside decode rows (the default)
unsized    the same without a limit to the slowdown of decode rows
separate   one worker computes prompts and hands over, another decodes, one thread each

Prompts of 256 random ids come all at once, so no cache knows them. The last line is JSON: output
tokens/s, medians over rounds, and the median ratio of a round to the first form.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.end_to_end import CACHE, piped_tokens_per_s, prompts_of
from tests.flow.rig import Rig
from workers.models.convert import convert, packaged_gguf

_ROOM = {"POINTSMAN_KVD_DRAM_BYTES": str(512 * 2**20)}
_TWO, _ONE = _ROOM | {"OMP_NUM_THREADS": "2"}, _ROOM | {"OMP_NUM_THREADS": "1"}
FORMS = {
    "both": ({"both-0": "both"}, _TWO),
    "unsized": ({"both-0": "both"}, _TWO | {"POINTSMAN_WORKER_MAX_DECODE_SLOWDOWN": "0"}),
    "separate": ({"prefill-0": "prefill", "decode-0": "decode"}, _ONE),
}


def measure(rigs: dict[str, Rig], options: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens/s by form and round, in turns; a first round is not counted."""
    rates: dict[str, list[float]] = {form: [] for form in rigs}
    for number in range(options.rounds + 1):
        for place, (form, rig) in enumerate(rigs.items()):
            prompts = prompts_of(len(rigs) * number + place, options.streams)
            rate = asyncio.run(piped_tokens_per_s(rig.base_url, prompts, options.tokens))
            rates[form].append(rate)
            rig.wait_at_rest()
        shown = ", ".join(f"{form} {own[-1]:.1f}" for form, own in rates.items())
        sys.stderr.write(f"round {number}: {shown}\n")
    return {form: own[1:] for form, own in rates.items()}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="only the last line")
    parser.add_argument(
        "--forms", default=",".join(FORMS), help="of these, the first to compare with"
    )
    options = parser.parse_args()
    forms = options.forms.split(",")
    CACHE.mkdir(parents=True, exist_ok=True)
    model = CACHE / "smollm2"
    convert(packaged_gguf(), model, lambda *_: None)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pointsman-bench-")))
        rigs: dict[str, Rig] = {}
        for form in forms:
            workers, env = FORMS[form]
            own = folder / form
            own.mkdir()
            rigs[form] = Rig(own, engine="torch", model=model, workers=workers, env=env)
            stack.callback(rigs[form].close)
            rigs[form].start()
        rates = measure(rigs, options)
    medians = {form: statistics.median(own) for form, own in rates.items()}
    ratios = {
        form: statistics.median(
            mine / first for mine, first in zip(own, rates[forms[0]], strict=True)
        )
        for form, own in rates.items()
    }
    result = {
        "load": os.getloadavg()[0],
        "streams": options.streams,
        "tokens_per_s": {form: round(rate, 1) for form, rate in medians.items()},
        f"over_{forms[0]}": {form: round(ratio, 3) for form, ratio in ratios.items()},
    }
    if not options.json:
        sys.stdout.write(", ".join(f"{name} {value}" for name, value in result.items()) + "\n")
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
