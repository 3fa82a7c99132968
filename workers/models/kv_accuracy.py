"""What compressed KV blocks cost in accuracy: a text's perplexity after a prefix that was packed.

`python -m workers.models.kv_accuracy --model DIR [--text FILE ...] [--dtype bfloat16] [--threads 1]`
computes the first tokens of each window of the text, puts their blocks back as each form of
`POINTSMAN_KVD_NVME_COMPRESSION` gives them back, and lets the model read on from there. Without
--text it reads the documents of this repository.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.intake.hf_vocabulary import HfVocabulary
from tiering.block_codec import Compression, codec_of
from workers.hbm_pool import ByteArray
from workers.model import Float32Array, Int64Array, ModelRunner
from workers.models.bench import EngineBench, Lane
from workers.models.load import load_runner

_ROOT = Path(__file__).resolve().parents[2]
_DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/reliability.md")
_STEP_TOKENS = 256


@dataclass(slots=True)
class Score:
    """One form over all windows so far."""

    compression: Compression
    block_bytes: int
    num_tokens: int = 0
    num_agreeing: int = 0
    surprise: float = 0.0  # negative log-likelihood, natural logarithm

    @property
    def perplexity(self) -> float:
        """Of the tokens read after the prefix."""
        return float(np.exp(self.surprise / self.num_tokens))

    @property
    def agreement(self) -> float:
        """Share of places where the likeliest token is the one without compression."""
        return self.num_agreeing / self.num_tokens


class Trial:
    """A model that reads windows of `num_prefix` tokens and then `num_read` more after each form.

    Raises:
        ValueError: the prefix is no whole number of blocks.
    """

    def __init__(self, runner: ModelRunner, num_prefix: int, num_read: int) -> None:
        layout = runner.spec.layout
        if num_prefix < 1 or num_prefix % layout.block_tokens:
            raise ValueError(f"a prefix of {num_prefix} tokens in blocks of {layout.block_tokens}")
        self._num_prefix = num_prefix
        self.window_tokens = num_prefix + num_read + 1  # the last is only guessed
        self._num_read = num_read
        self._bench = EngineBench(runner, -(-self.window_tokens // layout.block_tokens))
        self._lane = self._bench.lane([0] * (num_prefix + num_read))
        self._blocks = self._lane.block_ids[: num_prefix // layout.block_tokens]
        self._codecs = {form: codec_of(layout, form) for form in Compression}
        self.scores = [
            Score(form, codec.packed_bytes if codec else layout.block_bytes)
            for form, codec in self._codecs.items()
        ]

    def read(self, window: Sequence[int]) -> None:
        """Add one window of `window_tokens` tokens to the scores."""
        lane = Lane(list(window[:-1]), self._num_prefix, self._lane.block_ids)
        while lane.num_computed < self._num_prefix:
            self._bench.step([lane], [min(_STEP_TOKENS, self._num_prefix - lane.num_computed)])
        exact = [block.copy() for block in self._bench.hbm.read(self._blocks)]
        targets = np.array(window[self._num_prefix + 1 :])
        expected: Int64Array | None = None
        for score in self.scores:
            lane.num_computed = self._num_prefix
            self._put_back(exact, score.compression)
            logits = self._bench.step_all(lane, self._num_read)
            likeliest = logits.argmax(axis=1)
            expected = likeliest if expected is None else expected
            score.num_tokens += len(targets)
            score.num_agreeing += int((likeliest == expected).sum())
            score.surprise += surprise_of(logits, targets)

    def _put_back(self, exact: Sequence[ByteArray], compression: Compression) -> None:
        codec = self._codecs[compression]
        packed = np.empty(codec.packed_bytes if codec else 0, dtype=np.uint8)
        for block_id, block in zip(self._blocks, exact, strict=True):
            target = self._bench.hbm.begin_write(block_id)
            if codec is None:
                target[:] = block
            elif codec.pack(block, packed):
                codec.unpack(packed, target)
            else:
                raise ValueError("a block holds an infinity or no number")
            self._bench.hbm.finish_write(block_id)
        self._bench.hbm.settle()


def surprise_of(logits: Float32Array, targets: Int64Array) -> float:
    """Sum of -log p(target) over rows."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    totals = np.log(np.exp(shifted).sum(axis=1, dtype=np.float64))
    return float((totals - shifted[np.arange(len(targets)), targets]).sum())


def windows_of(tokens: Sequence[int], window_tokens: int, most: int) -> Iterator[Sequence[int]]:
    """Windows side by side, at most so many; none where the text is too short."""
    for start in list(range(0, len(tokens) - window_tokens + 1, window_tokens))[:most]:
        yield tokens[start : start + window_tokens]


def table_of(scores: Sequence[Score]) -> str:
    """One line a form, against the first."""
    lines = [f"{'form':<6} {'bytes/block':>12} {'perplexity':>11} {'change':>8} {'same top-1':>11}"]
    for score in scores:
        change = score.perplexity / scores[0].perplexity - 1
        lines.append(
            f"{score.compression:<6} {score.block_bytes:>12,} {score.perplexity:>11.4f} "
            f"{change:>+8.3%} {score.agreement:>11.2%}"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m workers.models.kv_accuracy")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--text", type=Path, nargs="+", help="files to read")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16 or auto")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--prefix", type=int, default=512, help="tokens that were packed")
    parser.add_argument("--read", type=int, default=256, help="tokens read after them")
    parser.add_argument("--windows", type=int, default=16, help="at most so many")
    options = parser.parse_args()
    import torch  # noqa: PLC0415  # after the arguments, which need none

    torch.set_num_threads(options.threads)
    paths = options.text or [path for name in _DOCUMENTS if (path := _ROOT / name).exists()]
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in paths)
    tokens = HfVocabulary.load(options.model).encode(text, special=False)
    trial = Trial(
        load_runner("torch", options.model, dtype=options.dtype), options.prefix, options.read
    )
    windows = list(windows_of(tokens, trial.window_tokens, options.windows))
    if not windows:
        sys.stderr.write(f"the text has {len(tokens)} tokens, a window {trial.window_tokens}\n")
        return 1
    for number, window in enumerate(windows, 1):
        trial.read(window)
        sys.stderr.write(f"\rwindow {number} of {len(windows)}")
        sys.stderr.flush()
    sys.stderr.write("\n")
    sys.stdout.write(
        f"{', '.join(path.name for path in paths)}: {len(windows)} windows of {options.prefix} tokens"
        f" packed and {options.read} read\n{table_of(trial.scores)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
