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
_SLICE_VALUES = 1 << 19  # rows are worked on in slices of about this many logits
_CDF_BLOCK = 256  # a CDF over blocks of so many tokens, and one within the block that is hit
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
    return [
        TokenRecord(token_id)
        if row.sampling.num_logprobs is None
        else _with_logprobs(logits[number], token_id, row.sampling.num_logprobs)
        for number, (row, token_id) in enumerate(zip(rows, token_ids.tolist(), strict=True))
    ]


@np.errstate(over="ignore", invalid="ignore")
def score(logits: Float32Array, token_ids: Sequence[int], num_logprobs: int) -> list[TokenRecord]:
    """Log-probabilities of given tokens, one per row of `logits` (R, vocab_size)."""
    if np.isnan(logits).any():
        logits = _without_nan(logits)
    return [
        _with_logprobs(row, token_id, num_logprobs)
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
    plain: list[int] = []
    for number, row in enumerate(rows):
        sampling = row.sampling
        if sampling.temperature <= GREEDY_TEMPERATURE or not np.isfinite(peaks[number]):
            continue
        if sampling.top_k == 0 and sampling.top_p >= 1:
            plain.append(number)
        else:
            token_ids[number] = _sample_truncated(logits[number], peaks[number], row)
    _sample_plain(logits, peaks, rows, plain, token_ids)
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


def _sample_plain(
    logits: Float32Array,
    peaks: Float32Array,
    rows: Sequence[SampleRow],
    plain: list[int],
    token_ids: Int64Array,
) -> None:
    """Sample the rows numbered `plain` over the whole vocabulary, in place of their token ids."""
    vocab_size = logits.shape[1]
    num_blocks = -(-vocab_size // _CDF_BLOCK)
    slice_rows = max(1, _SLICE_VALUES // vocab_size)
    for start in range(0, len(plain), slice_rows):
        numbers = np.array(plain[start : start + slice_rows])
        chosen = [rows[number] for number in numbers]
        blocks = np.zeros((len(numbers), num_blocks, _CDF_BLOCK), dtype=np.float32)
        weights = blocks.reshape(len(numbers), -1)[:, :vocab_size]
        np.subtract(logits[numbers], peaks[numbers, None], out=weights)
        weights /= np.array([[row.sampling.temperature] for row in chosen], dtype=np.float32)
        np.exp(weights, out=weights)
        min_shares = [[row.sampling.min_p] for row in chosen]
        if any(share for (share,) in min_shares):
            weights[weights < np.array(min_shares, dtype=np.float32)] = 0
        uniforms = np.array([uniform(row.sampling.seed, row.index) for row in chosen])
        token_ids[numbers] = _find_in_blocks(blocks, uniforms)


def _find_in_blocks(blocks: Float32Array, uniforms: Float64Array) -> list[int]:
    """Where each row's CDF passes its number: the block first, then the place in it.

    Sums of blocks are taken apart, row by row, so that a row's choice does not depend on others.
    """
    cdf = np.cumsum(blocks.sum(axis=2), axis=1, dtype=np.float64)
    targets = _targets(uniforms, cdf[:, -1])
    found: list[int] = []
    for row_blocks, row_cdf, target in zip(blocks, cdf, targets, strict=True):
        number = int(row_cdf.searchsorted(target, side="right"))
        inside = np.cumsum(row_blocks[number], dtype=np.float64)
        left = target - (row_cdf[number - 1] if number else 0.0)
        # The sum of a block was rounded: what is left may lie beyond its CDF by a hair.
        place = inside.searchsorted(min(left, np.nextafter(inside[-1], 0)), side="right")
        found.append(number * _CDF_BLOCK + int(place))
    return found


def _sample_truncated(logits: Float32Array, peak: np.float32, row: SampleRow) -> int:
    """Sample one row among `min_p`, then its `top_k` most likely, then those that make up `top_p`.

    The order is vLLM's: each step sees what the one before it left.
    """
    sampling = row.sampling
    token_ids, weights, wanted = _candidates(logits, peak, sampling)
    if sampling.top_p < 1:
        before = np.cumsum(weights) - weights
        num_kept = max(1, int(np.count_nonzero(before < wanted)))
        token_ids, weights = token_ids[:num_kept], weights[:num_kept]
    # By id and not by rank: two nearly equal logits that change places must not change the choice.
    by_id = np.argsort(token_ids)
    cdf = np.cumsum(weights[by_id])
    target = _targets(np.array(uniform(sampling.seed, row.index)), cdf[-1])
    return int(token_ids[by_id][cdf.searchsorted(target, side="right")])


def _candidates(
    logits: Float32Array, peak: np.float32, sampling: SamplingParams
) -> tuple[Int64Array, Float64Array, float]:
    """Ids and weights, best first, of all tokens that may be kept, and the weight to keep of them."""
    if sampling.top_k:
        token_ids = _best(logits, sampling.top_k)
        weights = _weights(logits[token_ids], peak, sampling.temperature).astype(np.float64)
        if sampling.min_p:
            num_likely = int(np.count_nonzero(weights >= np.float32(sampling.min_p)))
            token_ids, weights = token_ids[:num_likely], weights[:num_likely]
        return token_ids, weights, sampling.top_p * float(weights.sum())
    every_weight = _weights(logits, peak, sampling.temperature)
    every_weight[every_weight < np.float32(sampling.min_p)] = 0
    total = float(every_weight.sum(dtype=np.float64))
    # All tokens below this together weigh less than top_p leaves out, so they need no sorting.
    floor = _ROUNDED_OFF * (1 - sampling.top_p) * total / len(logits)
    token_ids = np.flatnonzero(every_weight > np.float32(floor))
    order = np.argsort(-logits[token_ids], kind="stable")
    token_ids = token_ids[order]
    return token_ids, every_weight[token_ids].astype(np.float64), sampling.top_p * total


def _weights(logits: Float32Array, peak: np.float32, temperature: float) -> Float32Array:
    """Probabilities up to a factor; the most likely token has 1."""
    weights: Float32Array = logits - peak
    weights /= np.float32(temperature)
    np.exp(weights, out=weights)
    return weights


def _best(logits: Float32Array, count: int) -> Int64Array:
    """Ids of the `count` largest logits, largest first, equal ones by id."""
    if count < len(logits):
        least = np.partition(logits, len(logits) - count)[len(logits) - count]
        token_ids = np.flatnonzero(logits >= least)
    else:
        token_ids = np.arange(len(logits))
    order = np.argsort(-logits[token_ids], kind="stable")[:count]
    best: Int64Array = token_ids[order]
    return best


def _targets(uniforms: Float64Array, totals: Float64Array) -> Float64Array:
    """Points of the CDF to look up; below the total, so that no impossible token is found."""
    targets: Float64Array = np.minimum(uniforms * totals, np.nextafter(totals, 0))
    return targets


def _with_logprobs(logits: Float32Array, token_id: int, num_logprobs: int) -> TokenRecord:
    top_ids = _best(logits, num_logprobs) if num_logprobs else np.empty(0, dtype=np.int64)
    values = logits[np.append(top_ids, token_id)].astype(np.float64)
    peak = np.float64(logits.max())
    if np.isfinite(peak):
        total = np.exp(logits - np.float32(peak)).sum(dtype=np.float64)
        values -= peak + np.log(total)
    finite = np.clip(np.nan_to_num(values, nan=LEAST_LOGPROB), LEAST_LOGPROB, 0.0).tolist()
    return TokenRecord(token_id, finite[-1], tuple(zip(top_ids.tolist(), finite, strict=False)))
