"""What a grammar costs: tokens of a real model held to a schema against free ones, in turns in one run.

`python tests/bench/grammar.py [--batch 8] [--tokens 128] [--rounds 5]`: milliseconds of wall and of CPU time
per token. Both kinds run the same number of steps over the same prompts; the best round of each counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeline.intake.grammar import GrammarBook, json_schema_grammar  # found by the line above
from pipeline.intake.hf_vocabulary import HfVocabulary
from pipeline.protocol.sampling import SamplingParams
from workers.kv_jobs import NoCache
from workers.models.convert import convert, packaged_gguf
from workers.models.load import load_runner
from workers.sequence import Sequence, StepOutput
from workers.settings import EngineSettings
from workers.step_loop import Engine

PROMPT = "A register of the ships that came into the harbour, number {}, as JSON:\n"
SHIP = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "year": {"type": "integer", "minimum": 1800, "maximum": 2100},
        "kind": {"enum": ["sail", "steam", "motor"]},
        "crew": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 4},
    },
    "required": ["name", "year", "kind", "crew"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": SHIP, "minItems": 1000}  # no answer comes to its end


class Sink:
    """Waits for the end of a round."""

    def __init__(self) -> None:
        self._ended = threading.Semaphore(0)

    def on_admitted(self, sequence: Sequence) -> None:
        """See `EngineSink`."""

    def on_prefilled(self, sequence: Sequence) -> None:
        """See `EngineSink`."""

    def on_step(self, outputs: list[StepOutput]) -> None:
        """See `EngineSink`."""
        for output in outputs:
            if output.ending is not None:
                self._ended.release()

    def wait(self, count: int) -> None:
        """Until so many more have ended."""
        for _ in range(count):
            self._ended.acquire()


class Bench:
    """One engine over the real model."""

    def __init__(self, batch: int, num_tokens: int) -> None:
        default = Path.home() / ".cache" / "pointsman-tests"
        directory = Path(os.environ.get("POINTSMAN_TEST_DATA", default)) / "smollm2"
        directory.parent.mkdir(parents=True, exist_ok=True)
        convert(packaged_gguf(), directory, lambda *_: None)
        self._vocabulary = HfVocabulary.load(directory)
        self._book = GrammarBook(self._vocabulary)
        self._batch, self._num_tokens = batch, num_tokens
        self._sink = Sink()
        settings = EngineSettings(num_blocks=1024, prefix_cache=False)
        runner = load_runner("torch", directory, dtype="auto")
        self._engine = Engine(runner, settings, NoCache(), self._sink, lambda _: None)
        self._engine.start()
        self._engine.ready.wait()

    def round(self, grammar: str, **fields: Any) -> tuple[float, float, str]:
        """Milliseconds of wall and of CPU time per token, and the first text."""
        sampling = SamplingParams(
            max_tokens=self._num_tokens, ignore_eos=not grammar, grammar=grammar, **fields
        )
        sequences = []
        for number in range(self._batch):
            prompt = self._vocabulary.encode(PROMPT.format(number), special=False)
            held = self._book.start(grammar) if grammar else None
            sequences.append(
                Sequence(str(number), 1, prompt, len(prompt), sampling, b"", grammar=held)
            )
        lengths = [len(sequence.tokens) for sequence in sequences]
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for sequence in sequences:
            self._engine.submit(sequence)
        self._sink.wait(self._batch)
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        outputs = [s.tokens[num:] for s, num in zip(sequences, lengths, strict=True)]
        total = sum(map(len, outputs))
        text = b"".join(map(self._vocabulary.token_bytes, outputs[0])).decode(errors="replace")
        return 1000 * wall_s / total, 1000 * cpu_s / total, text

    def close(self) -> None:
        """End the engine."""
        self._engine.stop(0)


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    bench = Bench(options.batch, options.tokens)
    grammar = json_schema_grammar(SCHEMA)
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "greedy": ("", {"temperature": 0.0}),
        "greedy, held": (grammar, {"temperature": 0.0}),
        "temperature": ("", {"temperature": 1.0}),
        "temperature, held": (grammar, {"temperature": 1.0}),
    }
    best: dict[str, tuple[float, float]] = {}
    for number in range(options.rounds + 1):
        for name, (text, fields) in kinds.items():
            wall_ms, cpu_ms, _ = bench.round(text, **fields)
            if number:  # the first round warms up
                known = best.get(name, (wall_ms, cpu_ms))
                best[name] = (min(known[0], wall_ms), min(known[1], cpu_ms))
    sys.stdout.write(bench.round(grammar, temperature=0.0)[2][:200] + "\n")
    bench.close()
    for name, (wall_ms, cpu_ms) in best.items():
        base = best[name.removesuffix(", held")]
        wall_cost, cpu_cost = 100 * (wall_ms / base[0] - 1), 100 * (cpu_ms / base[1] - 1)
        sys.stdout.write(
            f"{name:20} {wall_ms:7.3f} ms wall {cpu_ms:7.3f} ms CPU a token"
            f"  {wall_cost:+.1f} % wall {cpu_cost:+.1f} % CPU\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
