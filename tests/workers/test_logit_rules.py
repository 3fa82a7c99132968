"""Rules on logits: vLLM's meaning, the same however a sequence came to its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.logit_rules import LogitRules, apply_rules, rules_for
from workers.model import ModelSpec
from workers.models.digest import DigestRunner
from workers.sampling import SampleRow, sample
from workers.sequence import Sequence

Float32Array = npt.NDArray[np.float32]
MakeSequence = Callable[..., Sequence]
SPEC: ModelSpec = DigestRunner().spec
VOCAB = SPEC.vocab_size
EOS = next(iter(SPEC.eos_token_ids))


def expected(logits: Float32Array, sequence: Sequence) -> Float32Array:
    """The same by the book, one token after the other."""
    sampling = sequence.sampling
    output = sequence.tokens[sequence.num_prompt_tokens :]
    changed = logits.copy()
    for token_id, bias in sampling.logit_bias:
        changed[token_id] += np.float32(bias)
    for words in sampling.bad_words:
        num_before = len(words) - 1
        if num_before <= len(output) and output[len(output) - num_before :] == list(words[:-1]):
            changed[words[-1]] = -np.inf
    if len(output) < sampling.min_tokens:
        ends = set(sampling.stop_token_ids)
        ends |= set() if sampling.ignore_eos else set(SPEC.eos_token_ids)
        changed[list(ends)] = -np.inf
    for token_id in set(sequence.tokens):
        factor = np.float32(sampling.repetition_penalty)
        value = changed[token_id]
        changed[token_id] = value / factor if value > 0 else value * factor
    for token_id in set(output):
        changed[token_id] -= np.float32(
            sampling.presence_penalty + sampling.frequency_penalty * output.count(token_id)
        )
    return changed


def changed_by(rules: LogitRules | None, logits: Float32Array) -> Float32Array:
    rows = logits[None].copy()
    if rules is not None:
        apply_rules(rows, [rules], [0])
    row: Float32Array = rows[0]
    return row


TOKENS = st.lists(st.integers(0, 7), min_size=1, max_size=12)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.3, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.25, 2.0]),
        "logit_bias": st.dictionaries(st.integers(0, 9), st.sampled_from([-100.0, 0.5, 7.0])).map(
            lambda biases: tuple(biases.items())
        ),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.sampled_from([(), (3,), (3, 9)]),
        "ignore_eos": st.booleans(),
        "bad_words": st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)).map(
            tuple
        ),
    },
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    prompt=TOKENS, output=TOKENS, cut=st.integers(0, 12), options=OPTIONS, seed=st.integers(0, 9)
)
def test_rules_do_what_the_book_says_at_every_token_and_after_any_recovery(
    sequence: MakeSequence,
    prompt: list[int],
    output: list[int],
    cut: int,
    options: dict[str, Any],
    seed: int,
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)
    running = sequence("r", prompt, logged=output[:cut], **options)
    rules = rules_for(running, SPEC)

    for token_id in [*output[cut:], None]:
        recovered = rules_for(running, SPEC)
        assert (rules is None) is (recovered is None) is (not running.sampling.changes_logits)
        result = changed_by(rules, logits)
        np.testing.assert_array_equal(result, expected(logits, running))
        np.testing.assert_array_equal(result, changed_by(recovered, logits))
        if token_id is not None:
            running.tokens.append(token_id)
            if rules is not None:
                rules.add(token_id)


def test_a_request_without_an_option_has_no_rules(sequence: MakeSequence) -> None:
    plain = sequence("r", [1, 2], temperature=1.0, top_k=5, top_p=0.5, min_p=0.1, ignore_eos=True)
    assert rules_for(plain, SPEC) is None


def test_rules_leave_the_logits_and_the_log_probabilities_as_they_were(
    sequence: MakeSequence,
) -> None:
    logits = np.random.default_rng(1).normal(0, 3, (3, VOCAB)).astype(np.float32)
    raw = logits.copy()
    best = int(raw[1].argmax())
    asked = sequence("r", [1], logit_bias=((best, -100.0),), num_logprobs=2)
    plain = sequence("p", [1], num_logprobs=2)
    rules = rules_for(asked, SPEC)

    records = sample(
        logits,
        [
            SampleRow(plain.sampling, 0),
            SampleRow(asked.sampling, 0, rules),
            SampleRow(plain.sampling, 0),
        ],
    )

    np.testing.assert_array_equal(logits, raw)
    second = int(np.argsort(-raw[1])[1])
    assert [record.token_id for record in records] == [raw[0].argmax(), second, raw[2].argmax()]
    assert [token_id for token_id, _ in records[1].top] == [best, second]
    assert records[1].logprob == records[1].top[1][1]
    alone = sample(raw[1:2].copy(), [SampleRow(asked.sampling, 0, rules)])
    assert alone == records[1:2]


def test_a_token_id_without_a_logit_is_passed_over(sequence: MakeSequence) -> None:
    odd = sequence(
        "r",
        [1],
        logit_bias=((VOCAB, 5.0), (2**31, 5.0), (3, 1.0)),
        stop_token_ids=(VOCAB + 5,),
        bad_words=((VOCAB,), (1, VOCAB)),
        min_tokens=3,
    )
    rules = rules_for(odd, SPEC)
    assert rules is not None
    rules.add(1)
    assert sorted(rules.ids.tolist()) == [3, EOS]


def test_many_entries_find_room(sequence: MakeSequence) -> None:
    asked = sequence("r", list(range(200)), repetition_penalty=2.0)
    rules = rules_for(asked, SPEC)
    logits = np.ones(VOCAB, dtype=np.float32)
    assert np.count_nonzero(changed_by(rules, logits) == 0.5) == 200


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_ban_holds_whatever_the_logit(sequence: MakeSequence, value: float) -> None:
    asked = sequence("r", [1], bad_words=((7,),), repetition_penalty=1.5, temperature=1.0)
    rules = rules_for(asked, SPEC)
    logits = np.full((200, VOCAB), -50, dtype=np.float32)
    logits[:, 7] = value
    logits[:, 8] = 0

    records = sample(logits, [SampleRow(asked.sampling, index, rules) for index in range(200)])

    assert {record.token_id for record in records} == {8}
