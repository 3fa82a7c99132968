"""Choosing the next tokens from logits: greedy, or by inverse CDF with one number per token.

The random number of a token depends on its request's seed and its output index and on nothing
else, so a sequence is sampled alike alone, in any batch, and again after a recovery.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.tokens import TokenRecord
from workers.logit_rules import ChangedLogits, LogitRules, apply_rules
from workers.model import Float32Array, Int64Array
from workers.token_grammar import MaskedLogits

Float64Array = npt.NDArray[np.float64]

GREEDY_TEMPERATURE = 1e-6  # up to here, dividing by the temperature would only overflow
LEAST_LOGPROB = -9999.0  # stands for zero probability; infinity is no JSON number
_ROUNDED_OFF = 0.999  # bounds are widened by more than float32 sums lose
_LIKELY = np.float32(1e-3)  # of the peak: mostly enough for top_p
_CDF_BLOCK = 256  # a CDF over blocks of so many tokens, and one within the block that is hit
_COLUMNS_PER_WANTED, _FEWEST_COLUMNS, _FEWEST_ROWS = 8, 128, 16
_UNIT = 2.0**-53


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How to sample one row of logits; `index` is the output index of the token.

    `rules` are those of `workers.logit_rules.rules_for`: None where no option changes logits.
    `allowed` has a bit per token id that the row's grammar lets follow: None without a grammar.
    """

    sampling: SamplingParams
    index: int
    rules: LogitRules | None = None
    allowed: bytes | None = None


# The difference to the peak may be minus infinity, and a bias may meet an infinite logit.
@np.errstate(over="ignore", invalid="ignore")
def sample(logits: Float32Array, rows: Sequence[SampleRow]) -> list[TokenRecord]:
    """Choose one token per row of `logits` (R, vocab_size), which may be changed meanwhile.

    Log-probabilities are those of the raw logits, before rules, grammar, temperature and truncation.
    NaN counts as impossible. A row without an option costs nothing for those that have it.
    """
    if not rows:
        return []
    changes = list(_apply_options(logits, rows))
    token_ids, has_nan = _choose(logits, rows)
    for change in reversed(changes):
        change.undo()
    if has_nan:
        logits = _without_nan(logits)
    scratch = np.empty(logits.shape[1], dtype=np.float32)
    return [
        TokenRecord(token_id)
        if row.sampling.num_logprobs is None
        else _with_logprobs(logits[number], token_id, row.sampling.num_logprobs, scratch)
        for number, (row, token_id) in enumerate(zip(rows, token_ids.tolist(), strict=True))
    ]


@np.errstate(over="ignore", invalid="ignore")
def score(logits: Float32Array, token_ids: Sequence[int], num_logprobs: int) -> list[TokenRecord]:
    """Log-probabilities of given tokens, one per row of `logits` (R, vocab_size)."""
    if np.isnan(logits).any():
        logits = _without_nan(logits)
    scratch = np.empty(logits.shape[1], dtype=np.float32)
    return [
        _with_logprobs(row, token_id, num_logprobs, scratch)
        for row, token_id in zip(logits, token_ids, strict=True)
    ]


def _apply_options(
    logits: Float32Array, rows: Sequence[SampleRow]
) -> Iterator[ChangedLogits | MaskedLogits]:
    """Change what the rows' options change, the grammars last."""
    ruled = [number for number, row in enumerate(rows) if row.rules is not None]
    if ruled:
        yield apply_rules(logits, [row.rules for row in rows if row.rules is not None], ruled)
    masks = [(number, row.allowed) for number, row in enumerate(rows) if row.allowed is not None]
    if masks:
        is_seen = [rows[number].sampling.num_logprobs is not None for number, _ in masks]
        kept = [number for (number, _), seen in zip(masks, is_seen, strict=True) if seen]
        yield MaskedLogits(logits, masks, kept)


def _choose(logits: Float32Array, rows: Sequence[SampleRow]) -> tuple[Int64Array, bool]:
    """One token id per row, and whether there is a NaN among the logits."""
    token_ids, peaks = _greedy(logits)
    has_nan = bool(np.isnan(peaks).any())
    if has_nan:
        logits = _without_nan(logits)
        token_ids, peaks = _greedy(logits)
    sampled = [
        number
        for number, row in enumerate(rows)
        if row.sampling.temperature > GREEDY_TEMPERATURE and np.isfinite(peaks[number])
    ]
    if sampled:
        blocks = np.zeros((-(-logits.shape[1] // _CDF_BLOCK), _CDF_BLOCK), dtype=np.float32)
        for number in sampled:  # one by one: a row and its weights stay in the core's own cache
            token_ids[number] = _sample_row(logits[number], peaks[number], rows[number], blocks)
    return token_ids, has_nan


def _without_nan(logits: Float32Array) -> Float32Array:
    return np.where(np.isnan(logits), np.float32(-np.inf), logits)


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that chooses output token `index` of a request with this seed."""
    key = (seed % 2**64) | (index << 64)
    return float((np.random.Philox(key=key).random_raw() >> 11) * _UNIT)


def _greedy(logits: Float32Array) -> tuple[Int64Array, Float32Array]:
    token_ids = logits.argmax(axis=1)
    return token_ids, np.take_along_axis(logits, token_ids[:, None], axis=1)[:, 0]


def _sample_row(
    logits: Float32Array, peak: np.float32, row: SampleRow, blocks: Float32Array
) -> int:
    """Sample among `min_p`, then the `top_k` most likely, then those that make up `top_p`.

    The order is vLLM's: each step sees what the one before it left. `blocks` (n, _CDF_BLOCK) is
    overwritten, except for the places after the vocabulary, which are zero.
    """
    sampling = row.sampling
    number = uniform(sampling.seed, row.index)
    weights = blocks.reshape(-1)[: len(logits)]
    if sampling.top_k:
        token_ids = _best(logits, sampling.top_k)
        own = _weigh(logits[token_ids], peak, sampling.temperature)
        own = own[: np.count_nonzero(own >= np.float32(sampling.min_p))]
        return _sample_ranked(token_ids[: len(own)], own, sampling.top_p, number)
    _weigh(logits, peak, sampling.temperature, weights)
    total = None
    if sampling.min_p:
        token_ids = np.flatnonzero(weights >= np.float32(sampling.min_p))
        if sampling.top_p >= 1:
            return _find(token_ids, weights[token_ids], number)
    elif sampling.top_p >= 1:
        return _find_in_blocks(blocks, number)
    else:
        total = float(weights.sum())  # in pairs: as good as the weights
        token_ids = _nucleus(weights, sampling.top_p, total)
    ranked = token_ids[np.argsort(-logits[token_ids], kind="stable")]
    return _sample_ranked(ranked, weights[ranked], sampling.top_p, number, total)


def _find_in_blocks(blocks: Float32Array, number: float) -> int:
    """Where a row's CDF passes its number: the block first, then the place in it."""
    sums = np.einsum("ij->i", blocks)  # half the time of a sum along the axis
    cdf = np.cumsum(sums, dtype=np.float64)
    target = _target(number, cdf[-1])
    block = int(cdf.searchsorted(target, side="right"))
    inside = np.cumsum(blocks[block], dtype=np.float64)
    left = target - (cdf[block - 1] if block else 0.0)
    # The sum of a block was rounded: what is left may lie beyond its CDF by a hair.
    place = inside.searchsorted(min(left, np.nextafter(inside[-1], 0)), side="right")
    return block * _CDF_BLOCK + int(place)


def _nucleus(weights: Float32Array, top_p: float, total: float) -> Int64Array:
    """Ids of all tokens that may be among the most likely that make up `top_p`, and of some more."""
    likely = np.flatnonzero(weights > _LIKELY)
    if weights[likely].sum() * _ROUNDED_OFF >= top_p * total:
        return likely
    # All tokens below this together weigh less than top_p leaves out, so they need no sorting.
    floor = _ROUNDED_OFF * (1 - top_p) * total / len(weights)
    return np.flatnonzero(weights > np.float32(floor))


def _sample_ranked(
    token_ids: Int64Array,
    weights: Float32Array,
    top_p: float,
    number: float,
    total: float | None = None,
) -> int:
    """Sample among tokens ranked best first, those that make up `top_p` of a total weight.

    `total`: None where there are no others.
    """
    if top_p < 1:
        ends = np.cumsum(weights, dtype=np.float64)
        wanted = top_p * (float(ends[-1]) if total is None else total)
        num_kept = max(1, int(np.count_nonzero(ends - weights < wanted)))
        token_ids, weights = token_ids[:num_kept], weights[:num_kept]
    # By id and not by rank: two nearly equal logits that change places must not change the choice.
    by_id = np.argsort(token_ids)
    return _find(token_ids[by_id], weights[by_id], number)


def _find(token_ids: Int64Array, weights: Float32Array, number: float) -> int:
    """The token whose share of the CDF holds the number."""
    cdf = np.cumsum(weights, dtype=np.float64)
    return int(token_ids[cdf.searchsorted(_target(number, cdf[-1]), side="right")])


def _weigh(
    logits: Float32Array, peak: np.float32, temperature: float, out: Float32Array | None = None
) -> Float32Array:
    """Probabilities up to a factor; the most likely token has 1."""
    weights: Float32Array = np.subtract(logits, peak, out=out)
    if temperature != 1:
        weights *= np.float32(1 / temperature)
    np.exp(weights, out=weights)
    return weights


def _best(logits: Float32Array, count: int) -> Int64Array:
    """Ids of the `count` largest logits, largest first, equal ones by id."""
    least = _at_least(logits, count)
    token_ids = np.flatnonzero(logits >= least)
    order = np.argsort(-logits[token_ids], kind="stable")[:count]
    best: Int64Array = token_ids[order]
    return best


def _at_least(logits: Float32Array, count: int) -> np.float32:
    """A value that at least `count` logits reach, and not many more."""
    if count >= len(logits):
        return np.float32(-np.inf)
    num_columns = max(_FEWEST_COLUMNS, _COLUMNS_PER_WANTED * count)
    if num_columns * _FEWEST_ROWS > len(logits):
        return np.float32(np.partition(logits, len(logits) - count)[len(logits) - count])
    # Each column has a largest value; to take these costs a third of a partition of all.
    whole = logits[: len(logits) // num_columns * num_columns].reshape(-1, num_columns)
    tops = whole.max(axis=0)
    return np.float32(np.partition(tops, num_columns - count)[num_columns - count])


def _target(number: float, total: np.float64) -> float:
    """The point of the CDF to look up; below the total, so that no impossible token is found."""
    return float(min(number * total, np.nextafter(total, 0)))


def _with_logprobs(
    logits: Float32Array, token_id: int, num_logprobs: int, scratch: Float32Array
) -> TokenRecord:
    top_ids = _best(logits, num_logprobs) if num_logprobs else np.empty(0, dtype=np.int64)
    values = logits[np.append(top_ids, token_id)].astype(np.float64)
    peak = np.float64(logits.max())
    if np.isfinite(peak):
        total = np.float64(_weigh(logits, np.float32(peak), 1.0, scratch).sum())
        values -= peak + np.log(total)
    finite = np.clip(np.nan_to_num(values, nan=LEAST_LOGPROB), LEAST_LOGPROB, 0.0).tolist()
    return TokenRecord(token_id, finite[-1], tuple(zip(top_ids.tolist(), finite, strict=False)))
