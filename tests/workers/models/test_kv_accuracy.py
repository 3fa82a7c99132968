"""The command that says what compressed KV costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tiering.block_codec import Compression
from workers.models.bench import EngineBench
from workers.models.kv_accuracy import Trial, table_of
from workers.models.load import load_runner
from workers.models.perplexity import surprise_of, windows_of

PREFIX, READ = 64, 24


def test_without_compression_it_reads_as_if_nothing_had_been_moved_and_with_it_nearly_so(
    tiny_model: Callable[[str], Path],
) -> None:
    runner = load_runner("torch", tiny_model("llama"), dtype="float32")
    text = np.random.default_rng(2).integers(0, runner.spec.vocab_size, 200).tolist()
    windows = list(windows_of(text, PREFIX + READ + 1, 9))
    assert [len(window) for window in windows] == [PREFIX + READ + 1] * 2
    trial = Trial(runner, PREFIX, READ)
    for window in windows:
        trial.read(window)
    none, int8, fp8 = trial.scores
    assert [s.compression for s in trial.scores] == list(Compression)
    assert (none.num_tokens, none.agreement) == (2 * READ, 1.0)
    bench = EngineBench(runner)
    whole = 0.0
    for window in windows:
        logits = bench.step_all(bench.lane(window[:-1]), PREFIX + READ)[PREFIX:]
        whole += surprise_of(logits, np.array(window[PREFIX + 1 :]))
    assert none.surprise == pytest.approx(whole, rel=1e-5)
    for score in (int8, fp8):
        assert score.block_bytes < 0.3 * none.block_bytes
        assert 0 < abs(score.surprise - none.surprise) < 0.02 * none.surprise
    assert len(table_of(trial.scores).splitlines()) == 4


def test_a_prefix_that_is_no_whole_number_of_blocks_is_refused(
    tiny_model: Callable[[str], Path],
) -> None:
    runner = load_runner("torch", tiny_model("llama"), dtype="float32")
    with pytest.raises(ValueError, match="prefix of 65"):
        Trial(runner, 65, READ)
