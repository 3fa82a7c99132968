"""What guessing from the sequence's own text brings, on a prompt to be summarised.

`python -m workers.models.speculation_bench --model DIR [--dtype bfloat16] [--threads 1] [--streams 1,8]`
runs the whole engine with and without in turns; fails unless all tokens are the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.intake.chat_template import ChatTemplate
from pipeline.intake.hf_vocabulary import HfVocabulary
from pipeline.protocol.sampling import SamplingParams
from workers.kv_jobs import NoCache
from workers.models.load import load_runner
from workers.sequence import Sequence, StepOutput
from workers.settings import EngineSettings
from workers.step_loop import Engine

ARTICLE = (
    "The harbour board of Port Alder met on Tuesday to decide on the future of the old lighthouse. "
    "Built in 1871, the lighthouse stands on the northern pier and has been out of service since "
    "the automatic beacon was installed. The engineer of the board, Maria Holm, reported that the "
    "iron stairs are no longer safe and that a repair would cost four hundred thousand crowns. "
    "The town council offered to pay half of the repair if the lighthouse is opened to visitors in "
    "the summer months. Fishermen asked that the lamp be kept as a second light in winter storms, "
    "because the automatic beacon failed twice last year. The harbour board voted seven to two for "
    "the repair, and the work on the iron stairs is to begin in the spring. "
)
TASKS = (
    "Summarise the article, quoting its sentences",
    "Repeat the article and correct its spelling",
    "List the facts of the article in its own words",
    "Tell which people and bodies the article names, with the sentence that names them",
)
NUM_TOKENS = 128
NUM_ROUNDS = 3
WAIT_S = 600.0


@dataclass(slots=True)
class Outputs:
    """The engine's sink: tokens by sequence, and an event when all have ended."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    num_open: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def on_admitted(self, sequence: Sequence) -> None:
        """See `EngineSink`."""

    def on_step(self, outputs: list[StepOutput]) -> None:
        """See `EngineSink`."""
        for output in outputs:
            if output.record is not None:
                self.tokens[output.sequence.request_id].append(output.record.token_id)
            self.num_open -= output.ending is not None
        if not self.num_open:
            self.done.set()

    def on_prefilled(self, sequence: Sequence) -> None:
        """See `EngineSink`; nothing is handed over."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of all prompts: decode seconds, the tokens, guesses made and held."""

    seconds: float
    tokens: list[list[int]]
    num_drafts: int
    num_held: int


class BenchEngine:
    """An engine whose prompts stay cached, so that a second run is decode alone."""

    def __init__(self, model: Path, dtype: str, num_drafts: int) -> None:
        self.sink = Outputs()
        runner = load_runner("torch", model, dtype=dtype)
        settings = EngineSettings(num_blocks=1024, speculation_tokens=num_drafts)
        self.engine = Engine(runner, settings, NoCache(), self.sink, lambda _: None)
        self.engine.start()
        self.engine.ready.wait()

    def turn(self, prompts: list[list[int]]) -> Turn:
        """Run all prompts at once.

        Raises:
            TimeoutError: the engine does not end.
        """
        before = self.engine.stats()
        sequences = [
            Sequence(
                request_id=str(rank),
                attempt=1,
                tokens=list(prompt),
                num_prompt_tokens=len(prompt),
                sampling=SamplingParams(max_tokens=NUM_TOKENS, temperature=0),
                key_root=bytes(32),
            )
            for rank, prompt in enumerate(prompts)
        ]
        self.sink.tokens = {sequence.request_id: [] for sequence in sequences}
        self.sink.num_open = len(sequences)
        self.sink.done.clear()
        began_s = time.perf_counter()
        for sequence in sequences:
            self.engine.submit(sequence)
        if not self.sink.done.wait(WAIT_S):
            raise TimeoutError
        seconds = time.perf_counter() - began_s
        after = self.engine.stats()
        return Turn(
            seconds,
            list(self.sink.tokens.values()),
            after.num_drafts - before.num_drafts,
            after.num_drafts_held - before.num_drafts_held,
        )


def chat_prompts(model: Path, num_prompts: int) -> list[list[int]]:
    """The article with a task each, as the model's chat template has it."""
    vocabulary = HfVocabulary.load(model)
    template = ChatTemplate.load(model)
    texts = [f"{TASKS[rank % len(TASKS)]}.\n\n{ARTICLE}" for rank in range(num_prompts)]
    return [template.encode([{"role": "user", "content": text}], vocabulary) for text in texts]


def compare(engines: tuple[BenchEngine, BenchEngine], prompts: list[list[int]]) -> str:
    """One line of figures; the engines take turns.

    Raises:
        ValueError: their tokens differ.
    """
    for engine in engines:
        engine.turn(prompts)  # computes and caches the prompts
    turns: tuple[list[Turn], list[Turn]] = ([], [])
    for _ in range(NUM_ROUNDS):
        for engine, some in zip(engines, turns, strict=True):
            some.append(engine.turn(prompts))
    if len({str(turn.tokens) for some in turns for turn in some}) > 1:
        raise ValueError("guessing changed the output")
    plain_s, guessing_s = (statistics.median(turn.seconds for turn in some) for some in turns)
    num_tokens = sum(map(len, turns[0][0].tokens))
    last = turns[1][-1]
    return (
        f"{len(prompts)} streams, {num_tokens} tokens: {num_tokens / plain_s:.1f} tokens/s without, "
        f"{num_tokens / guessing_s:.1f} with ({plain_s / guessing_s:.2f} x); "
        f"{last.num_held} of {last.num_drafts} guesses held, tokens equal\n"
    )


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m workers.models.speculation_bench")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--drafts", type=int, default=8, help="most guesses of a step")
    parser.add_argument("--streams", default="1,4,8", help="how many at once, with commas")
    options = parser.parse_args()
    import torch  # noqa: PLC0415  # after the arguments, which need none

    torch.set_num_threads(options.threads)
    engines = (
        BenchEngine(options.model, options.dtype, 0),
        BenchEngine(options.model, options.dtype, options.drafts),
    )
    for count in map(int, options.streams.split(",")):
        sys.stdout.write(compare(engines, chat_prompts(options.model, count)))
        sys.stdout.flush()
    for engine in engines:
        engine.engine.stop(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
