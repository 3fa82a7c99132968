"""The script engine: exactly what is listed, wherever the sequence runs."""

from __future__ import annotations

import math
import time

import pytest

from pipeline.protocol.sampling import SamplingParams
from pipeline.script_book import EOS_ID, ScriptBook
from workers.models.bench import EngineBench
from workers.models.script import ScriptRunner
from workers.sampling import SampleRow, sample

BOOK = ScriptBook.model_validate(
    {
        "scripts": {
            "default": {"pieces": ["caf", {"hex": "C3"}, {"hex": "A9"}, "!"]},
            "endless": {"pieces": ["a", "round"], "ends": False},
            "likely": {"pieces": ["x"], "logprob": -0.25},
            "slow": {"pieces": ["x", "y"], "prefill_delay_ms": 60, "token_delay_ms": 20},
        }
    }
)


def bench() -> EngineBench:
    return EngineBench(ScriptRunner(BOOK))


def spoken(prompt: bytes, num_tokens: int) -> list[bytes]:
    tokens = bench().generate(list(prompt), num_tokens).tokens[len(prompt) :]
    return [BOOK.vocabulary[token] for token in tokens]


def test_pieces_come_one_per_token_then_end_of_text() -> None:
    assert spoken(b"hello", 6) == [b"caf", b"\xc3", b"\xa9", b"!", b"<eos>", b"<eos>"]


def test_an_endless_script_repeats_its_last_piece() -> None:
    assert spoken(b"say [[endless]] now", 5) == [b"a", b"round", b"round", b"round", b"round"]


def test_a_sequence_goes_on_where_it_was_after_a_recovery() -> None:
    other = bench()
    lane = other.lane([*b"hello", *BOOK.token_ids("default")[:2]], 3)
    lane.num_prompt_tokens = 5

    other.catch_up(lane)

    assert lane.tokens[-1] == 0xA9


@pytest.mark.parametrize(("name", "logprob"), [("likely", -0.25), ("default", 0.0)])
def test_the_log_probability_is_the_one_listed(name: str, logprob: float) -> None:
    other = bench()
    logits = other.step([other.lane(f"[[{name}]]".encode())], [len(name) + 4])

    record = sample(
        logits, [SampleRow(SamplingParams(max_tokens=1, temperature=0, num_logprobs=5), 0)]
    )[0]

    assert record.logprob == pytest.approx(logprob, abs=1e-6)
    assert record.top[0] == (record.token_id, record.logprob)
    assert all(math.isfinite(value) for _, value in record.top)


def test_a_certain_script_is_followed_at_any_temperature() -> None:
    other = bench()
    logits = other.step([other.lane(b"hello")], [5])

    for index in range(200):
        row = SampleRow(SamplingParams(max_tokens=1, temperature=2.0), index)
        assert sample(logits, [row])[0].token_id == BOOK.token_ids("default")[0]


def test_the_longest_delay_of_the_batch_is_slept_once() -> None:
    other = bench()
    lanes = [other.lane(b"[[slow]]", 4) for _ in range(3)] + [other.lane(b"x", 4)]
    began = time.perf_counter()
    other.step(lanes, [8, 8, 8, 1])
    prefilled = time.perf_counter()
    for lane in lanes:
        lane.tokens.append(EOS_ID)
    other.step(lanes, [1, 1, 1, 1])
    decoded = time.perf_counter()

    assert 0.06 <= prefilled - began < 0.12
    assert 0.02 <= decoded - prefilled < 0.06
