"""What a form of the operators costs in accuracy: how well a model in it foretells a text.

`python -m workers.models.perplexity --model DIR [--forms auto,int8] [--text FILE ...] [--threads 1]`
prints each form's perplexity, and how often its likeliest token is that of the first. Without
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
from workers.model import Float32Array, Int64Array, ModelRunner
from workers.models.bench import FORMS, EngineBench, Lane, runner_of

_ROOT = Path(__file__).resolve().parents[2]
_DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/reliability.md")
_STEP_TOKENS = 256


@dataclass(slots=True, kw_only=True)
class Tally:
    """Over all windows so far; `surprise` is a negative log-likelihood, natural logarithm."""

    num_tokens: int = 0
    num_agreeing: int = 0
    surprise: float = 0.0

    @property
    def perplexity(self) -> float:
        """Of the tokens read."""
        return float(np.exp(self.surprise / self.num_tokens))

    @property
    def agreement(self) -> float:
        """Share of places where the likeliest token is that of the first form."""
        return self.num_agreeing / self.num_tokens


@dataclass(slots=True)
class Score(Tally):
    """Of one form."""

    form: str


class Reader:
    """A model that foretells windows of a text, each from its start."""

    def __init__(self, runner: ModelRunner, window_tokens: int) -> None:
        block_tokens = runner.spec.layout.block_tokens
        self._bench = EngineBench(runner, -(-window_tokens // block_tokens))
        self._block_ids = self._bench.lane([0] * window_tokens).block_ids

    def logits_of(self, window: Sequence[int]) -> Iterator[Float32Array]:
        """Logits behind each token but the last, some hundred rows at a time.

        They lie in a buffer that the next ones overwrite.
        """
        lane = Lane(list(window[:-1]), len(window) - 1, self._block_ids)
        while (left := len(lane.tokens) - lane.num_computed) > 0:
            yield self._bench.step_all(lane, min(_STEP_TOKENS, left))


def surprise_of(logits: Float32Array, targets: Int64Array) -> float:
    """Sum of -log p(target) over rows of logits (R, vocab_size)."""
    peaks = logits.max(axis=1, keepdims=True)
    totals = np.exp(logits - peaks).sum(axis=1, dtype=np.float64)
    told = np.take_along_axis(logits - peaks, targets[:, None], axis=1)[:, 0]
    return float((np.log(totals) - told).sum())


def score_window(readers: Sequence[Reader], scores: Sequence[Score], window: Sequence[int]) -> None:
    """Add one window to the scores, which are the readers'."""
    targets = np.array(window[1:])
    expected: Int64Array | None = None
    for reader, score in zip(readers, scores, strict=True):
        likeliest: list[Int64Array] = []
        at = 0
        for logits in reader.logits_of(window):
            score.surprise += surprise_of(logits, targets[at : at + len(logits)])
            likeliest.append(logits.argmax(axis=1))
            at += len(logits)
        own = np.concatenate(likeliest)
        expected = own if expected is None else expected
        score.num_tokens += len(own)
        score.num_agreeing += int((own == expected).sum())


def texts_to_read(named: Sequence[Path] | None) -> list[Path]:
    """The files named, or the documents of this repository."""
    return list(named or [path for name in _DOCUMENTS if (path := _ROOT / name).exists()])


def tokens_of(model: Path, texts: Sequence[Path]) -> list[int]:
    """All texts as one, in the tokens of the model in this directory."""
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in texts)
    return HfVocabulary.load(model).encode(text, special=False)


def windows_of(tokens: Sequence[int], window_tokens: int, most: int) -> list[Sequence[int]]:
    """Windows side by side, at most so many; none where the text is too short."""
    starts = range(0, len(tokens) - window_tokens + 1, window_tokens)
    return [tokens[start : start + window_tokens] for start in starts[:most]]


def table_of(scores: Sequence[Score]) -> str:
    """One line a form, against the first."""
    lines = [f"{'form':<20} {'perplexity':>11} {'change':>8} {'same top-1':>11}"]
    for score in scores:
        change = score.perplexity / scores[0].perplexity - 1
        figures = f"{score.perplexity:>11.4f} {change:>+8.2%} {score.agreement:>11.2%}"
        lines.append(f"{score.form:<20} {figures}")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m workers.models.perplexity")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--forms", default="auto,int8", help=f"of {', '.join(FORMS)}, with commas")
    parser.add_argument("--text", type=Path, nargs="+", help="files to read")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--window", type=int, default=512, help="tokens read from a fresh start")
    parser.add_argument("--windows", type=int, default=32, help="at most so many")
    options = parser.parse_args(arguments)
    import torch  # noqa: PLC0415  # after the arguments, which need none

    torch.set_num_threads(options.threads)
    paths = texts_to_read(options.text)
    tokens = tokens_of(options.model, paths)
    windows = windows_of(tokens, options.window, options.windows)
    if not windows:
        sys.stderr.write(f"the text has {len(tokens)} tokens, a window {options.window}\n")
        return 1
    scores = [Score(form) for form in options.forms.split(",")]
    readers = [Reader(runner_of(score.form, options.model), options.window) for score in scores]
    for number, window in enumerate(windows, 1):
        score_window(readers, scores, window)
        sys.stderr.write(f"\rwindow {number} of {len(windows)}")
        sys.stderr.flush()
    names = ", ".join(path.name for path in paths)
    sys.stderr.write("\n")
    sys.stdout.write(f"{names}: {len(windows)} windows of {options.window} tokens\n")
    sys.stdout.write(table_of(scores))
    return 0


if __name__ == "__main__":
    sys.exit(main())
