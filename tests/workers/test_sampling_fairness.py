"""20,000 draws of each method against the distribution that numpy works out on its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from workers.logit_rules import rules_for
from workers.models.digest import DigestRunner
from workers.sampling import SampleRow, sample
from workers.sequence import Sequence

NUM_DRAWS = 20_000
SLICE = 2_000
SPEC = DigestRunner().spec
VOCAB = SPEC.vocab_size
PROMPT, OUTPUT = [0, 1, 2, 3, 3], [4, 5, 5, 1]
Float64Array = npt.NDArray[np.float64]


def reference(logits: Float64Array, fields: dict[str, Any]) -> Float64Array:
    """Probabilities of every token, in plain float64, each option as vLLM's documentation has it."""
    logits = logits.copy()
    for token_id, bias in fields.get("logit_bias", ()):
        logits[token_id] += bias
    for words in fields.get("bad_words", ()):
        if tuple(OUTPUT[len(OUTPUT) - len(words) + 1 :]) == words[:-1]:
            logits[words[-1]] = -math.inf
    if fields.get("min_tokens", 0) > len(OUTPUT):
        logits[[*SPEC.eos_token_ids, *fields.get("stop_token_ids", ())]] = -math.inf
    for token_id in range(VOCAB):
        if token_id in PROMPT + OUTPUT:
            factor = fields.get("repetition_penalty", 1.0)
            logits[token_id] = logits[token_id] * (1 / factor if logits[token_id] > 0 else factor)
        logits[token_id] -= fields.get("frequency_penalty", 0.0) * OUTPUT.count(token_id)
        logits[token_id] -= fields.get("presence_penalty", 0.0) * (token_id in OUTPUT)
    shares = softmax(logits / fields["temperature"])
    shares[shares < fields.get("min_p", 0.0) * shares.max()] = 0
    order = np.argsort(-shares, kind="stable")
    shares[order[fields.get("top_k", VOCAB) :]] = 0
    shares /= shares.sum()
    sorted_shares = shares[order]
    before = np.cumsum(sorted_shares) - sorted_shares
    shares[order[before >= fields.get("top_p", 1.0)]] = 0
    result: Float64Array = shares / shares.sum()
    return result


def softmax(logits: Float64Array) -> Float64Array:
    weights: Float64Array = np.exp(logits - logits.max())
    result: Float64Array = weights / weights.sum()
    return result


def too_far(counts: npt.NDArray[np.int64], shares: Float64Array) -> bool:
    """Chi-square of the counts beyond what one fair sampler in ten thousand reaches.

    Rare tokens are counted together (at least 5 expected each); the critical value is Wilson and
    Hilferty's.
    """
    expected = shares * counts.sum()
    is_rare = expected < 5
    seen, wanted = counts[~is_rare].astype(float), expected[~is_rare]
    if expected[is_rare].sum() >= 5:
        seen = np.append(seen, counts[is_rare].sum())
        wanted = np.append(wanted, expected[is_rare].sum())
    freedom = len(seen) - 1
    if freedom == 0:
        return False
    spread = 2 / (9 * freedom)
    critical = freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3
    return bool(((seen - wanted) ** 2 / wanted).sum() > critical)


METHODS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 12},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "top_k and top_p": {"top_k": 30, "top_p": 0.7},
    "min_p and top_p": {"min_p": 0.05, "top_p": 0.9},
    "min_p, top_k and top_p": {"min_p": 0.05, "top_k": 20, "top_p": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "repetition rewarded": {"repetition_penalty": 0.6},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.2},
    "logit_bias": {"logit_bias": ((9, 2.5), (4, -1.5), (5, -100.0))},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": (2, 9)},
    "bad_words": {"bad_words": ((3,), (5, 1, 6), (5, 2, 7), (1, 8))},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": ((9, 1.0),),
        "bad_words": ((3,),),
        "min_tokens": 9,
        "min_p": 0.02,
        "top_k": 60,
        "top_p": 0.95,
        "temperature": 1.3,
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_draws_fall_as_the_reference_says(sequence: Callable[..., Sequence], method: str) -> None:
    fields = {"temperature": 1.0} | METHODS[method]
    logits = np.random.default_rng(11).normal(0, 1.5, VOCAB)
    logits[:10] += 2  # what the options are about, is likely
    logits[list(SPEC.eos_token_ids)] = 3
    asked = sequence("r", PROMPT, logged=OUTPUT, seed=41, max_tokens=99, **fields)
    rules = rules_for(asked, SPEC)
    repeated = np.repeat(logits[None].astype(np.float32), SLICE, axis=0)

    counts = np.zeros(VOCAB, dtype=np.int64)
    for start in range(0, NUM_DRAWS, SLICE):
        rows = [SampleRow(asked.sampling, start + place, rules) for place in range(SLICE)]
        drawn = [record.token_id for record in sample(repeated, rows)]
        counts += np.bincount(drawn, minlength=VOCAB)

    shares = reference(logits.astype(np.float32).astype(np.float64), fields)
    assert counts[shares == 0].sum() == 0
    assert not too_far(counts, shares)


def test_the_measure_itself_sees_a_sampler_that_is_off() -> None:
    shares = softmax(np.random.default_rng(3).normal(0, 1, 50))
    rng = np.random.default_rng(4)
    fair = rng.multinomial(NUM_DRAWS, shares)
    off = rng.multinomial(NUM_DRAWS, softmax(np.log(shares) * 1.05))
    assert not too_far(fair, shares)
    assert too_far(off, shares)
