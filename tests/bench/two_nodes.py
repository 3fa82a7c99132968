"""A 2,000-token prompt handed over between two nodes: pulled, computed again, or as the cost model says.

    python tests/bench/two_nodes.py [--rounds 3] [--mbit 1000 50]

Two cache daemons in network namespaces of their own, a line of a set speed between them (needs root),
a prefill worker at one and a decode worker at the other, the packaged model. What is measured is the
pause between the first token (from prefill) and the second (from decode). The three policies take
turns, so that other work on the machine hits them alike; each has a worker of its own, which was
warmed by two prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.flow.rig import Rig, wait_until
from tests.flow.talk import body, client, events
from tests.flow.test_two_networks import prompt, start_node
from tests.network_line import HERE, THERE, Line, open_line
from workers.models.convert import convert, packaged_gguf

POLICIES = ("cost", "always", "never")
NUM_WARM = 2
MAX_SHARE = 1.1


def say(line: str) -> None:
    """Print one line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Nodes:
    """Both nodes; `decode` starts the decode worker anew with a policy, its caches empty."""

    def __init__(self, rig: Rig, line: Line) -> None:
        self.rig = rig
        self.num_prompts = 0
        rig.start()
        for node, space, address in (("node-a", line.near, HERE), ("node-b", line.far, THERE)):
            start_node(rig, node, space, address)
        self._start("prefill", "node-a", "cost")

    def decode(self, policy: str) -> None:
        """Have one decode worker, with this policy."""
        if "decode" in self.rig.workers:
            self.rig.terminate("decode", 60)
        self._start("decode", "node-b", policy)
        self.rig.wait_ready()
        wait_until(lambda: all(b["peer_address"] for b in self.rig.beats().values()), 30, "beats")

    def pause_s(self) -> float:
        """Seconds between the first and the second token of a fresh prompt."""
        self.num_prompts += 1
        return asyncio.run(self._pause_s(prompt(1_000 + self.num_prompts)))

    async def _pause_s(self, tokens: list[int]) -> float:
        fields = body(tokens, max_tokens=4, ignore_eos=True, stream=True)
        async with (
            client(self.rig) as http,
            http.stream("POST", "/v1/completions", json=fields) as answer,
        ):
            seen_s = [time.perf_counter() async for _ in events(answer)]
        return seen_s[1] - seen_s[0]

    def _start(self, name: str, node: str, policy: str) -> None:
        env = {
            "POINTSMAN_NODE": node,
            "POINTSMAN_KVD_SOCKET": str(self.rig.folder / f"{node}.sock"),
            "POINTSMAN_WORKER_LOADS": policy,
        }
        offset = len(self.rig.log(name)) if name in self.rig.workers else 0
        self.rig.start_worker(name, name, **env)
        wait_until(lambda: "worker_ready" in self.rig.log(name)[offset:], 60, name)


def measure(nodes: Nodes, num_rounds: int) -> dict[str, list[float]]:
    """Pauses by policy."""
    pauses: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for _ in range(num_rounds):
        for policy in POLICIES:
            nodes.decode(policy)
            for _ in range(NUM_WARM):
                nodes.pause_s()
            pauses[policy].append(nodes.pause_s())
    return pauses


def judge(mbit: int, pauses: dict[str, list[float]]) -> bool:
    """Print a line; whether the cost model's choice was about as good as the better forced one."""
    medians = {policy: statistics.median(taken) for policy, taken in pauses.items()}
    best_s = min(medians["always"], medians["never"])
    share = medians["cost"] / best_s
    shown = "  ".join(f"{policy} {taken_s:.2f} s" for policy, taken_s in medians.items())
    say(f"{mbit} Mbit/s: pause by policy: {shown}; cost at {share:.2f} of the better one")
    return share <= MAX_SHARE


def run(mbits: Sequence[int], num_rounds: int, folder: Path) -> int:
    """Measure on every line."""
    model = Path.home() / ".cache" / "pointsman-tests" / "smollm2"
    convert(packaged_gguf(), model, lambda *_: None)
    is_good = True
    with open_line() as line:
        rig = Rig(folder, engine="torch", model=model, workers={}, has_kvd=False)
        try:
            nodes = Nodes(rig, line)
            for mbit in mbits:
                line.shape(mbit * 1_000_000)
                is_good &= judge(mbit, measure(nodes, num_rounds))
        finally:
            rig.close()
    return int(not is_good)


def main() -> int:
    """Exit status 1 when the cost model chose more than a tenth worse than the better choice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000, 50])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return run(options.mbit, options.rounds, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
