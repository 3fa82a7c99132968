"""Choosing the next tokens from logits: greedy, or by inverse CDF with one number per token.

The random number of a token depends on its request's seed and its output index and on nothing
else, so a sequence is sampled alike alone, in any batch, and again after a recovery.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.tokens import TokenRecord
from workers.model import Float32Array, Int64Array

Float64Array = npt.NDArray[np.float64]

GREEDY_TEMPERATURE = 1e-6  # up to here, dividing by the temperature would only overflow
LEAST_LOGPROB = -9999.0  # stands for zero probability; infinity is no JSON number
_NUM_CANDIDATES = 1024  # top_p sorts these; where they hold too little, more by this factor:
_MORE_CANDIDATES = 8
_SLICE_VALUES = 1 << 19  # rows are worked on in slices of about this many logits
_UNIT = 2.0**-53


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How to sample one row of logits; `index` is the output index of the token."""

    sampling: SamplingParams
    index: int


@np.errstate(over="ignore")  # the difference to the peak may be minus infinity
def sample(logits: Float32Array, rows: Sequence[SampleRow]) -> list[TokenRecord]:
    """Choose one token per row of `logits` (R, vocab_size).

    Log-probabilities are those of the raw logits, before temperature and truncation. NaN counts as
    impossible.
    """
    if not rows:
        return []
    token_ids, peaks = _greedy(logits)
    if np.isnan(peaks).any():
        logits = np.where(np.isnan(logits), np.float32(-np.inf), logits)
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
    return [
        TokenRecord(token_id)
        if row.sampling.num_logprobs is None
        else _with_logprobs(logits[number], token_id, row.sampling.num_logprobs)
        for number, (row, token_id) in enumerate(zip(rows, token_ids.tolist(), strict=True))
    ]


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
    slice_rows = max(1, _SLICE_VALUES // logits.shape[1])
    for start in range(0, len(plain), slice_rows):
        numbers = np.array(plain[start : start + slice_rows])
        temperatures = np.array(
            [[rows[number].sampling.temperature] for number in numbers], dtype=np.float32
        )
        weights = logits[numbers] - peaks[numbers, None]
        weights /= temperatures
        np.exp(weights, out=weights)
        cdf = np.cumsum(weights, axis=1, dtype=np.float64)
        uniforms = np.array(
            [uniform(rows[number].sampling.seed, rows[number].index) for number in numbers]
        )
        targets = _targets(uniforms, cdf[:, -1])
        token_ids[numbers] = [
            row_cdf.searchsorted(target, side="right")
            for row_cdf, target in zip(cdf, targets, strict=True)
        ]


def _sample_truncated(logits: Float32Array, peak: np.float32, row: SampleRow) -> int:
    """Sample one row among its `top_k` most likely tokens, then those that make up `top_p`."""
    sampling = row.sampling
    vocab_size = len(logits)
    count = min(sampling.top_k or _NUM_CANDIDATES, vocab_size)
    token_ids, weights = _best_weights(logits, peak, sampling.temperature, count)
    if sampling.top_k:
        wanted = sampling.top_p * float(weights.sum())
    else:
        all_weights = _weights(logits, peak, sampling.temperature)
        wanted = sampling.top_p * float(all_weights.sum(dtype=np.float64))
    while not sampling.top_k and count < vocab_size and weights.sum() < wanted:
        count = min(count * _MORE_CANDIDATES, vocab_size)
        token_ids, weights = _best_weights(logits, peak, sampling.temperature, count)
    if sampling.top_p < 1:
        before = np.cumsum(weights) - weights
        num_kept = max(1, int(np.count_nonzero(before < wanted)))
        token_ids, weights = token_ids[:num_kept], weights[:num_kept]
    # By id and not by rank: two nearly equal logits that change places must not change the choice.
    by_id = np.argsort(token_ids)
    cdf = np.cumsum(weights[by_id])
    target = _targets(np.array(uniform(sampling.seed, row.index)), cdf[-1])
    return int(token_ids[by_id][cdf.searchsorted(target, side="right")])


def _best_weights(
    logits: Float32Array, peak: np.float32, temperature: float, count: int
) -> tuple[Int64Array, Float64Array]:
    token_ids = _best(logits, count)
    return token_ids, _weights(logits[token_ids], peak, temperature).astype(np.float64)


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
