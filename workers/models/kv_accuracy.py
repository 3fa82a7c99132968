"""What compressed KV blocks cost in accuracy: a text's perplexity after a prefix that was packed.

`python -m workers.models.kv_accuracy --model DIR [--text FILE ...] [--dtype bfloat16] [--threads 1]`
computes the first tokens of each window of the text, puts their blocks back as each form of
`POINTSMAN_KVD_NVME_COMPRESSION` gives them back, and lets the model read on from there. Without
--text it reads the documents of this repository.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tiering.block_codec import Compression, codec_of
from workers.hbm_pool import ByteArray
from workers.model import Int64Array, ModelRunner
from workers.models.bench import EngineBench, Lane
from workers.models.load import load_runner
from workers.models.perplexity import Tally, surprise_of, texts_to_read, tokens_of, windows_of

_STEP_TOKENS = 256


@dataclass(slots=True)
class Score(Tally):
    """Of one form: the tokens read after the prefix."""

    compression: Compression
    block_bytes: int


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
    paths = texts_to_read(options.text)
    tokens = tokens_of(options.model, paths)
    trial = Trial(
        load_runner("torch", options.model, dtype=options.dtype), options.prefix, options.read
    )
    windows = windows_of(tokens, trial.window_tokens, options.windows)
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
