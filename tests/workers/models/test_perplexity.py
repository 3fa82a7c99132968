"""The cost of a form in accuracy is measured against known figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from workers.models.load import load_runner
from workers.models.perplexity import Reader, Score, main, score_window, surprise_of, windows_of


def test_surprise_is_that_of_a_softmax() -> None:
    logits = np.random.default_rng(1).normal(0, 5, (7, 30)).astype(np.float32)
    targets = np.arange(7) * 3

    shares = np.exp(logits.astype(np.float64))
    shares /= shares.sum(axis=1, keepdims=True)

    assert surprise_of(logits, targets) == pytest.approx(
        -np.log(shares[np.arange(7), targets]).sum(), rel=1e-6
    )


def test_a_window_scores_what_transformers_scores(tiny_model: Callable[[str], Path]) -> None:
    directory = tiny_model("llama")
    window = np.random.default_rng(2).integers(0, 300, 40).tolist()
    score = Score("float32")

    score_window([Reader(load_runner("torch", directory), 40)], [score], window)

    ids = torch.tensor([window])
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    with torch.inference_mode():
        loss = model(ids, labels=ids).loss.item()
    assert score.num_tokens == 39
    assert score.perplexity == pytest.approx(np.exp(loss), rel=1e-4)
    assert score.agreement == 1


def test_windows_lie_side_by_side_and_a_short_text_has_none() -> None:
    assert windows_of(list(range(10)), 4, 9) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows_of(list(range(10)), 4, 1) == [[0, 1, 2, 3]]
    assert windows_of([1, 2], 4, 9) == []


@pytest.fixture
def model_of_bytes(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny model whose tokens are bytes."""
    source = tiny_model("llama")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: rank for rank, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_the_command_prints_a_line_for_each_form(
    model_of_bytes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abcbaccabd" * 16)
    command = ["--model", str(model_of_bytes), "--text", str(text), "--window", "50"]

    assert main([*command, "--forms", "float32,float32"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "text.txt: 3 windows of 50 tokens"
    assert lines[2] == lines[3]
    assert lines[3].endswith("+0.00%     100.00%")
    text.write_text("a")
    assert main(command) == 1
    assert "a window 50" in capsys.readouterr().err
