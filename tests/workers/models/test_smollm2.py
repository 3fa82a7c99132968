"""The real model: SmolLM2-135M-Instruct, converted, against Hugging Face."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from workers.model import Float32Array
from workers.models.bench import EngineBench, Lane
from workers.models.convert import convert, packaged_gguf
from workers.models.load import load_runner
from workers.models.torch_runner import TorchRunner

NUM_PROMPTS, NUM_TOKENS = 32, 64
NUM_BLOCKS = 500
PROMPT_TOKENS = (5, 13, 40, 64, 100, 211, 333, 500)
TEXT = (
    "The lighthouse keeper wrote every evening in a thick brown book. He noted the wind, the height"
    " of the waves, and the ships that passed on their way to the harbour. In winter, when storms"
    " came from the north, he stayed awake until morning and kept the lamp burning. On calm summer"
    " days he repaired his boat, painted the railing white, and taught the children of the village"
    " how to read the clouds. One day a letter arrived, and it said that the lamp would soon be"
    " replaced by a machine. "
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def smollm2(test_data: Path) -> Path:
    directory = test_data / "smollm2"
    convert(packaged_gguf(), directory, lambda *_: None)
    return directory


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    """Four prompts of each length, side by side."""
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    texts = [TEXT[start:] + TEXT * 6 for start in range(0, 10 * NUM_PROMPTS, 10)]
    return [
        tokenizer.encode(text.lstrip()).ids[: PROMPT_TOKENS[number // 4]]
        for number, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def expected(smollm2: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy continuations by Hugging Face's own modules and cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    continuations: list[list[int]] = []
    with torch.inference_mode():
        for first in range(0, NUM_PROMPTS, 4):
            given, cache, steps = torch.tensor(prompts[first : first + 4]), None, []
            for _ in range(NUM_TOKENS):
                output = model(given, cache=cache, use_cache=True)
                cache = output.cache
                given = output.logits[:, -1:].argmax(dim=2)
                steps.append(given)
            continuations += torch.cat(steps, dim=1).tolist()
    return continuations


def generate_together(bench: EngineBench, lanes: list[Lane]) -> list[list[int]]:
    """NUM_TOKENS greedy tokens of each lane, all in one batch."""
    for _ in range(NUM_TOKENS):
        logits = bench.step(lanes, [len(lane.tokens) - lane.num_computed for lane in lanes])
        for lane, row in zip(lanes, logits, strict=True):
            lane.tokens.append(int(row.argmax()))
    return [lane.tokens[lane.num_prompt_tokens :] for lane in lanes]


def test_greedy_tokens_alone_equal_those_of_hugging_face(
    smollm2: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    bench = EngineBench(load_runner("torch", smollm2), NUM_BLOCKS)

    generated = [bench.generate(prompt, NUM_TOKENS).tokens[len(prompt) :] for prompt in prompts]

    assert generated == expected


@pytest.mark.parametrize("chunk_tokens", [1000, 48])
def test_a_batch_of_all_gives_the_same_tokens_however_its_prompts_are_cut(
    chunk_tokens: int, smollm2: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    bench = EngineBench(load_runner("torch", smollm2), NUM_BLOCKS)
    lanes = [bench.lane(prompt, NUM_TOKENS) for prompt in prompts]
    for lane in lanes:
        while lane.num_prompt_tokens - lane.num_computed > chunk_tokens:
            bench.step([lane], [chunk_tokens])

    assert generate_together(bench, lanes) == expected


def test_a_batch_with_restored_prefixes_gives_the_same_tokens(
    smollm2: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    runner = load_runner("torch", smollm2)
    source = EngineBench(runner, NUM_BLOCKS)
    computed = [source.lane(prompt) for prompt in prompts]
    source.step(computed, [len(prompt) for prompt in prompts])
    bench = EngineBench(runner, NUM_BLOCKS, seed=9)
    lanes = [bench.lane(prompt, NUM_TOKENS) for prompt in prompts]
    for lane, from_lane in zip(lanes, computed, strict=True):
        num_blocks = (lane.num_prompt_tokens - 1) // 16
        bench.pool[lane.block_ids[:num_blocks]] = source.pool[from_lane.block_ids[:num_blocks]]
        lane.num_computed = num_blocks * 16

    assert generate_together(bench, lanes) == expected


def test_it_knows_the_capital_of_france(smollm2: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]

    for dtype in ("float32", "bfloat16"):
        runner = load_runner("torch", smollm2, dtype=dtype)
        tokens = EngineBench(runner).generate(prompt, 12).tokens[len(prompt) :]
        assert "Paris" in tokenizer.decode(tokens)
        assert runner.spec.eos_token_ids & set(tokens)


def test_native_bfloat16_stays_near_float32_and_gives_the_same_bytes_in_any_batch(
    smollm2: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Against a float32 run fed the same tokens: top token in at least 95 %, logits on average 0.1.

    docs/performance.md states the difference; this prints it (pytest -s).
    """
    runner = load_runner("torch", smollm2, dtype="auto")
    if not (isinstance(runner, TorchRunner) and runner.operators.batch_invariant):
        pytest.skip("this machine has no native operators")
    prompts, expected = prompts[::4], expected[::4]
    texts = [prompt + own for prompt, own in zip(prompts, expected, strict=True)]
    native = EngineBench(runner, num_blocks=300)
    alone = forced_logits(native, texts, prompts)
    exact = forced_logits(
        EngineBench(load_runner("torch", smollm2), num_blocks=300), texts, prompts
    )

    same = alone.argmax(axis=-1) == exact.argmax(axis=-1)
    error = np.abs(alone - exact)
    firsts = [int(row.argmin()) if not row.all() else NUM_TOKENS for row in same]
    sys.stdout.write(
        f"bfloat16 against float32: top token the same in {100 * same.mean():.1f} %, logits off by "
        f"{error.mean():.3f} on average, {error.max():.2f} at most; first other token after {firsts}\n"
    )
    assert same.mean() >= 0.95
    assert error.mean() <= 0.1
    batched = forced_logits(EngineBench(runner, num_blocks=300, seed=5), texts, prompts, at_once=8)
    np.testing.assert_array_equal(batched, alone)


def forced_logits(
    bench: EngineBench, texts: list[list[int]], prompts: list[list[int]], at_once: int = 1
) -> Float32Array:
    """Logits of each generated token of each text, (texts, NUM_TOKENS, vocab), its tokens given."""
    results = []
    for first in range(0, len(texts), at_once):
        lanes = [bench.lane(text) for text in texts[first : first + at_once]]
        rows = []
        for lane, prompt in zip(lanes, prompts[first : first + at_once], strict=True):
            lane.num_prompt_tokens = len(prompt)
        counts = [lane.num_prompt_tokens for lane in lanes]
        for _ in range(NUM_TOKENS):
            rows.append(bench.step(lanes, counts).copy())
            counts = [1] * len(lanes)
        results.append(np.stack(rows, axis=1))
    return np.concatenate(results)
