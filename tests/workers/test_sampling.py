"""Sampling: exact where it can be, fair where it is random, finite always."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.tokens import pack_records
from workers.sampling import LEAST_LOGPROB, SampleRow, sample, uniform

Float32Array = npt.NDArray[np.float32]


def row(index: int = 0, **fields: float | None) -> SampleRow:
    return SampleRow(SamplingParams.model_validate({"max_tokens": 9, **fields}), index)


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> Float32Array:
    return np.random.default_rng(seed).normal(0, 4, (num_rows, vocab_size)).astype(np.float32)


def softmax(logits: Float32Array, temperature: float = 1.0) -> npt.NDArray[np.float64]:
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    result: npt.NDArray[np.float64] = weights / weights.sum()
    return result


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 1e-6])
def test_a_temperature_of_nearly_zero_is_greedy(temperature: float) -> None:
    logits = random_logits(4, 500)

    records = sample(logits, [row(temperature=temperature)] * 4)

    assert [record.token_id for record in records] == logits.argmax(axis=1).tolist()
    assert records[0].logprob is None
    assert records[0].top == ()


def test_equal_logits_are_decided_for_the_lower_id() -> None:
    logits = np.zeros((1, 3000), dtype=np.float32)
    logits[0, [70, 2000]] = 5

    record = sample(logits, [row(temperature=0, num_logprobs=4)])[0]

    assert record.token_id == 70
    assert [token_id for token_id, _ in record.top] == [70, 2000, 0, 1]


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 0.0}, {"top_k": 1, "top_p": 0.5}])
def test_one_kept_token_is_the_greedy_one(fields: dict[str, float]) -> None:
    logits = random_logits(8, 2000)

    records = sample(logits, [row(number, temperature=2, **fields) for number in range(8)])

    assert [record.token_id for record in records] == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 7}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.7}, {"top_k": 10**6}]
)
def test_frequencies_are_those_of_the_truncated_distribution(fields: dict[str, float]) -> None:
    logits = random_logits(1, 40)
    probabilities = softmax(logits[0], 1.5)
    order = np.argsort(-probabilities)
    order = order[: int(fields.get("top_k", 40))]
    kept = probabilities[order] / probabilities[order].sum()
    order = order[np.cumsum(kept) - kept < fields.get("top_p", 1.0)]
    expected = np.zeros(40)
    expected[order] = probabilities[order] / probabilities[order].sum()

    rows = [row(index, temperature=1.5, seed=5, **fields) for index in range(4000)]
    records = sample(np.repeat(logits, 4000, axis=0), rows)

    counts = np.bincount([record.token_id for record in records], minlength=40)
    assert counts[expected == 0].sum() == 0
    assert np.abs(counts / 4000 - expected).max() < 0.03


def test_top_p_reaches_past_the_first_candidates_where_they_hold_too_little() -> None:
    logits = np.zeros((1, 50_000), dtype=np.float32)

    chosen = {
        sample(logits, [row(index, temperature=1, top_p=0.9)])[0].token_id for index in range(40)
    }

    assert max(chosen) > 30_000
    assert max(chosen) < 45_000


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    index=st.integers(0, 2**20),
    top_k=st.sampled_from([0, 5, 2000]),
    top_p=st.sampled_from([0.0, 0.3, 0.99, 1.0]),
    place=st.integers(0, 5),
)
def test_a_row_is_sampled_alike_alone_and_in_any_batch(
    seed: int, index: int, top_k: int, top_p: float, place: int
) -> None:
    logits = random_logits(6, 1500, seed=index)
    wanted = row(index, temperature=1.3, seed=seed, top_k=top_k, top_p=top_p)
    rows = [row(number, temperature=number / 3, num_logprobs=number) for number in range(6)]
    rows[place] = wanted

    alone = sample(logits[place : place + 1], [wanted])[0]
    together = sample(logits, rows)[place]

    assert alone == together


def test_seed_and_index_each_change_the_number() -> None:
    numbers = {uniform(seed, index) for seed in (-1, 0, 1, 2**63 - 1) for index in range(100)}

    assert len(numbers) == 400
    assert min(numbers) >= 0
    assert max(numbers) < 1
    assert uniform(7, 3) == uniform(7, 3)


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    logits = random_logits(3, 2000)
    rows = [
        row(number, temperature=1.7, top_k=50, num_logprobs=count)
        for number, count in enumerate((0, 5, 20))
    ]

    records = sample(logits, rows)

    for record, raw, count in zip(records, logits, (0, 5, 20), strict=True):
        expected = np.log(softmax(raw))
        best = np.argsort(-raw, kind="stable")[:count]
        assert record.logprob == pytest.approx(expected[record.token_id], abs=1e-5)
        assert [token_id for token_id, _ in record.top] == best.tolist()
        assert [value for _, value in record.top] == pytest.approx(expected[best], abs=1e-5)
        pack_records([record], count)


@settings(max_examples=150, deadline=None)
@given(
    logits=hnp.arrays(
        np.float32,
        (2, 30),
        elements=st.one_of(
            st.floats(width=32, allow_nan=True, allow_infinity=True),
            st.sampled_from([0.0, 3.4e38, -3.4e38, float("-inf")]),
        ),
    ),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 40),
)
def test_any_logits_give_a_valid_token_and_finite_log_probabilities(
    logits: Float32Array, temperature: float, top_p: float, top_k: int
) -> None:
    fields = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "num_logprobs": 20}

    records = sample(logits, [row(0, **fields), row(1, **fields)])

    for record, raw in zip(records, logits, strict=True):
        assert 0 <= record.token_id < 30
        assert record.logprob is not None
        values = [record.logprob, *(value for _, value in record.top)]
        assert all(LEAST_LOGPROB <= value <= 0 for value in values)
        assert len(record.top) == 20
        possible = np.nan_to_num(raw, nan=-np.inf, neginf=-np.inf, posinf=np.inf) > -np.inf
        assert possible[record.token_id] or not possible.any()


def test_an_impossible_token_is_never_sampled() -> None:
    logits = np.full((1, 260), -np.inf, dtype=np.float32)
    logits[0, 32:127] = 0

    rows = [row(index, temperature=1) for index in range(2000)]
    records = sample(np.repeat(logits, 2000, axis=0), rows)

    assert {record.token_id for record in records} == set(range(32, 127))


def test_no_rows_give_no_records() -> None:
    assert sample(np.empty((0, 10), dtype=np.float32), []) == []


@pytest.mark.parametrize("vocab_size", [7, 2048, 5000, 49_152])
@pytest.mark.parametrize("count", [1, 5, 20])
def test_the_best_logits_are_those_of_a_full_sort(vocab_size: int, count: int) -> None:
    rng = np.random.default_rng(vocab_size + count)
    logits = rng.normal(0, 1, vocab_size).astype(np.float32).round(1)  # with ties
    logits[rng.integers(0, vocab_size, vocab_size // 3)] = -np.inf
    sampling = SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=count)

    (record,) = sample(logits[None].copy(), [SampleRow(sampling, 0)])

    order = np.lexsort((np.arange(vocab_size), -logits))[:count].tolist()
    assert [token_id for token_id, _ in record.top] == order
