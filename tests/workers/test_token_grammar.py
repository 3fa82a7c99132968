"""Masks in the batch sampler, and sequences that obey their grammar to its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from pipeline.intake.grammar import GrammarBook, json_schema_grammar
from pipeline.intake.vocabulary import ByteVocabulary
from pipeline.protocol.failure import Ending, FailureCode, FinishReason
from pipeline.protocol.sampling import SamplingParams
from tests.workers.conftest import Engines, make_sequence
from workers.logit_rules import rules_for
from workers.model import Float32Array
from workers.models.digest import DigestRunner
from workers.sampling import SampleRow, sample
from workers.sequence import Sequence

VOCAB_SIZE = 1000
ALLOWED = (3, 40, 999)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "years": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9999},
            "maxItems": 3,
        },
    },
    "required": ["city", "size", "years"],
    "additionalProperties": False,
}
STOP = Ending(reason=FinishReason.STOP)
BOOK = GrammarBook(ByteVocabulary())


def bits(*token_ids: int) -> bytes:
    return sum(1 << token_id for token_id in token_ids).to_bytes(VOCAB_SIZE // 8 + 7, "little")


def row(index: int = 0, allowed: bytes | None = None, **fields: Any) -> SampleRow:
    return SampleRow(SamplingParams(max_tokens=9, **fields), index, allowed=allowed)


def random_logits(num_rows: int) -> Float32Array:
    return np.random.default_rng(5).normal(0, 4, (num_rows, VOCAB_SIZE)).astype(np.float32)


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {}, {"top_k": 500}, {"top_p": 0.99}, {"min_p": 0.5}]
)
def test_only_allowed_tokens_are_chosen(fields: dict[str, float]) -> None:
    rows = [row(index, bits(*ALLOWED), **fields) for index in range(64)]
    records = sample(random_logits(64), rows)
    assert {record.token_id for record in records} <= set(ALLOWED)


def test_rows_without_a_grammar_are_sampled_as_if_alone() -> None:
    logits = random_logits(6)
    alone = sample(logits.copy(), [row(index) for index in range(6)])
    beside = sample(logits, [row(index, bits(5) if index % 2 else None) for index in range(6)])
    assert beside[::2] == alone[::2]
    assert {record.token_id for record in beside[1::2]} == {5}


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_the_grammar_has_the_last_word_over_the_model(value: float) -> None:
    logits = random_logits(2)
    logits[:, ALLOWED] = value
    records = sample(logits, [row(0, bits(*ALLOWED), temperature=0), row(1, bits(*ALLOWED))])
    assert {record.token_id for record in records} <= set(ALLOWED)


def test_the_grammar_has_the_last_word_over_rules() -> None:
    spec = DigestRunner().spec
    sequence = make_sequence("r", [65], logit_bias=((66, 100.0),), bad_words=((67,),))
    only = (1 << 67).to_bytes(36, "little")
    logits = np.zeros((1, spec.vocab_size), dtype=np.float32)
    (record,) = sample(logits, [SampleRow(sequence.sampling, 0, rules_for(sequence, spec), only)])
    assert record.token_id == 67


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    logits = random_logits(2)
    best = logits.argmax(axis=1)
    free = sample(logits.copy(), [row(index, temperature=0, num_logprobs=3) for index in range(2)])
    held = sample(
        logits,
        [row(0, bits(*ALLOWED), temperature=0, num_logprobs=3), row(1, temperature=0)],
    )
    assert held[0].token_id in ALLOWED
    assert held[0].top == free[0].top
    assert held[1].token_id == best[1]


def constrained(name: str, prompt: list[int], logged: list[int], **fields: Any) -> Sequence:
    grammar = json_schema_grammar(SCHEMA)
    return make_sequence(
        name,
        prompt,
        fields.pop("max_tokens", 200),
        grammar=grammar,
        logged=logged,
        **fields,
    )


def with_grammar(sequence: Sequence) -> Sequence:
    logged = sequence.tokens[sequence.num_prompt_tokens :]
    sequence.grammar = BOOK.start(sequence.sampling.grammar, logged)
    return sequence


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_output_obeys_its_schema_and_stops(engines: Engines, temperature: float) -> None:
    running = engines.start()
    sequences = [
        with_grammar(constrained(f"r{seed}", [65 + seed], [], temperature=temperature, seed=seed))
        for seed in range(8)
    ]
    free = make_sequence("free", [99], 40)
    outputs = running.run(*sequences, free)
    for sequence, tokens in zip(sequences, outputs, strict=False):
        jsonschema.validate(json.loads(bytes(tokens)), SCHEMA)
        assert running.sink.endings[sequence] == STOP
    assert outputs[-1] == engines.reference([99], 40)


@pytest.mark.parametrize("speculation_tokens", [0, 8])
def test_a_next_attempt_goes_on_in_the_same_place(
    engines: Engines, speculation_tokens: int
) -> None:
    running = engines.start(speculation_tokens=speculation_tokens)
    (whole,) = running.run(with_grammar(constrained("whole", [70], [], temperature=1.0, seed=3)))
    for cut in (1, 9, len(whole) - 1):
        again = with_grammar(constrained(f"r{cut}", [70], whole[:cut], temperature=1.0, seed=3))
        assert running.run(again) == [whole[cut:]]


def test_an_attempt_that_died_before_its_ending_stops_at_once(engines: Engines) -> None:
    running = engines.start()
    (whole,) = running.run(with_grammar(constrained("whole", [70], [])))
    again = with_grammar(constrained("again", [70], whole))
    running.engine.submit(again)
    running.sink.wait_ended(again)
    assert running.sink.endings[again] == STOP


def test_a_sequence_without_its_grammar_is_never_run_unconstrained(engines: Engines) -> None:
    running = engines.start()
    sequence = constrained("r", [70], [])
    running.engine.submit(sequence)
    running.sink.wait_ended(sequence)
    assert running.sink.endings[sequence] == Ending(failure=FailureCode.INTERNAL_ERROR)


class _Failing:
    """A grammar whose third step fails."""

    allowed = b"\xff" * 36
    is_complete = False

    def __init__(self) -> None:
        self.num_taken = 0

    def take(self, token_id: int) -> None:
        self.num_taken += 1
        if self.num_taken > 2:
            raise RuntimeError(token_id)


def test_a_grammar_that_fails_ends_its_sequence_and_no_other(
    engines: Engines, sequence: Callable[..., Sequence]
) -> None:
    running = engines.start()
    failing = sequence("failing", [70], 30, grammar="?")
    failing.grammar = _Failing()
    other = sequence("other", [71], 30)
    _, tokens = running.run(failing, other)
    assert running.sink.endings[failing] == Ending(failure=FailureCode.INTERNAL_ERROR)
    assert tokens == engines.reference([71], 30)


def test_max_tokens_and_stop_strings_cut_a_constrained_output(engines: Engines) -> None:
    running = engines.start()
    short = with_grammar(constrained("short", [70], [], max_tokens=5))
    assert [len(tokens) for tokens in running.run(short)] == [5]
    assert running.sink.endings[short] == Ending(reason=FinishReason.LENGTH)
