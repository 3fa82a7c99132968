"""The contract of the model port, on every engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from workers.model import ModelRunner, StepBatch
from workers.models.bench import EngineBench
from workers.models.errors import EngineNotKnown, ModelFilesMissing
from workers.models.load import load_runner

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100] * 5


def test_the_spec_is_whole(runner: ModelRunner) -> None:
    spec = runner.spec

    assert len(spec.fingerprint) == 32
    assert spec.layout.block_tokens == 16
    assert spec.context_tokens == 512
    assert spec.eos_token_ids
    assert all(0 <= token_id < spec.vocab_size for token_id in spec.eos_token_ids)


def test_logits_are_one_float32_row_per_wanted_row(runner: ModelRunner) -> None:
    bench = EngineBench(runner)

    logits = bench.step([bench.lane(PROMPT), bench.lane(PROMPT[:7])], [60, 3])

    assert logits.shape == (2, runner.spec.vocab_size)
    assert logits.dtype == np.float32
    assert not np.isnan(logits).any()


def test_a_step_whose_logits_nobody_wants_gives_none(runner: ModelRunner) -> None:
    bench = EngineBench(runner)
    batch = StepBatch(
        token_ids=np.array(PROMPT[:5], np.int64),
        positions=np.arange(5),
        slot_mapping=np.arange(48, 53),
        cu_query_lens=np.array([0, 5], np.int32),
        context_lens=np.array([5], np.int32),
        block_tables=np.array([[3, 0]], np.int32),
        logit_rows=np.empty(0, np.int64),
        histories=[PROMPT],
        num_prompt_tokens=[len(PROMPT)],
    )

    assert bench.runner.forward(batch).shape == (0, runner.spec.vocab_size)


def test_a_chunked_prompt_gives_the_tokens_of_a_whole_one(exact_runner: ModelRunner) -> None:
    whole = EngineBench(exact_runner).generate(PROMPT, 12)

    for chunk_tokens in (1, 7, 16, 48):
        assert EngineBench(exact_runner, seed=chunk_tokens).generate(
            PROMPT, 12, chunk_tokens
        ).tokens == (whole.tokens)


def test_a_batch_of_prefill_and_decode_gives_each_its_tokens_of_the_lone_run(
    exact_runner: ModelRunner,
) -> None:
    prompts = [PROMPT, PROMPT[3:20], PROMPT[:1], PROMPT[5:40]]
    alone = [EngineBench(exact_runner).generate(prompt, 9).tokens for prompt in prompts]
    bench = EngineBench(exact_runner)
    lanes = [bench.lane(prompt, 9) for prompt in prompts]

    while any(len(lane.tokens) < len(want) for lane, want in zip(lanes, alone, strict=True)):
        going = [lane for lane in lanes if len(lane.tokens) < lane.num_prompt_tokens + 9]
        counts = [min(9, len(lane.tokens) - lane.num_computed) for lane in going]
        logits = bench.step(going, counts)
        for lane, row in zip(going, logits, strict=True):
            if lane.num_computed == len(lane.tokens):
                lane.tokens.append(int(row.argmax()))

    assert [lane.tokens for lane in lanes] == alone


def test_restored_blocks_are_as_good_as_computed_ones(exact_runner: ModelRunner) -> None:
    source = EngineBench(exact_runner, seed=2)
    computed = source.generate(PROMPT, 12)
    other = EngineBench(exact_runner, seed=3)
    restored = other.lane(PROMPT, 12)
    restored.num_computed = 59
    for theirs, own in zip(computed.block_ids, restored.block_ids, strict=True):
        other.pool[own] = source.pool[theirs]

    for _ in range(12):
        other.catch_up(restored)

    assert restored.tokens == computed.tokens


def test_kv_bytes_depend_on_the_tokens_and_not_on_the_blocks(runner: ModelRunner) -> None:
    one = EngineBench(runner, seed=4)
    first = one.lane(PROMPT)
    one.catch_up(first)
    other = EngineBench(runner, seed=5)
    second = other.lane(PROMPT)
    other.catch_up(second)

    for left, right in zip(
        one.hbm.read(first.block_ids[:3]), other.hbm.read(second.block_ids[:3]), strict=True
    ):
        assert (left == right).all()


def test_an_unknown_engine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(EngineNotKnown, match="torch, digest, script"):
        load_runner("tensor", None)


def test_the_torch_engine_asks_for_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesMissing, match="model directory"):
        load_runner("torch", None)
    with pytest.raises(ModelFilesMissing, match=r"config\.json"):
        load_runner("torch", tmp_path)
