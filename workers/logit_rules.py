"""What a request may change about its logits, token by token: penalties, biases, bans.

Order and meaning are vLLM's (`SamplingParams`): bans and biases, then the repetition penalty over
prompt and output (Keskar et al. 2019), then frequency and presence penalties over the output.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.protocol.sampling import SamplingParams
from workers.model import Float32Array, Int64Array, ModelSpec
from workers.sequence import Sequence

BANNED = np.float32(-np.inf)
_FIRST_CAPACITY = 16


def rules_for(sequence: Sequence, spec: ModelSpec) -> LogitRules | None:
    """The rules of a sequence as its tokens stand now; None for one that changes no logits.

    They depend on the tokens alone, so that a recovery on another worker goes on with the same.
    Token ids outside the vocabulary have no logit and are passed over.
    """
    if not sequence.sampling.changes_logits:
        return None
    rules = LogitRules(sequence.sampling, spec)
    rules.read_prompt(sequence.tokens[: sequence.num_prompt_tokens])
    for token_id in sequence.tokens[sequence.num_prompt_tokens :]:
        rules.add(token_id)
    return rules


class LogitRules:
    """The tokens of one sequence whose logits change, and how; kept up to date by `add`.

    Entry i is about token `ids[i]`: its logit becomes repeat(logit + biases[i]) - penalties[i],
    where repeat divides a positive value by repetitions[i] and multiplies any other. Ids are
    distinct; the arrays are views into buffers that the next `add` may change. `min_tokens` bans what
    would end the output: with `ignore_eos` that is not end-of-text.
    """

    def __init__(self, sampling: SamplingParams, spec: ModelSpec) -> None:
        self._sampling = sampling
        self._vocab_size = spec.vocab_size
        self._entries: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._ids = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._numbers = np.zeros((3, _FIRST_CAPACITY), dtype=np.float32)
        self._num_output = 0
        self._given = dict(sampling.logit_bias)
        ends = () if sampling.ignore_eos else tuple(spec.eos_token_ids)
        self._ends = frozenset((*ends, *sampling.stop_token_ids)) if sampling.min_tokens else ()
        self._banned = {words[0] for words in sampling.bad_words if len(words) == 1}
        self._phrases = [words for words in sampling.bad_words if len(words) > 1]
        self._phrase_ends: set[int] = set()
        self._tail: list[int] = []
        self._tail_length = max(map(len, self._phrases), default=1) - 1
        for token_id in (*self._given, *self._banned, *self._ends):
            self._set_bias(token_id)

    @property
    def ids(self) -> Int64Array:
        """Tokens with an entry."""
        return self._ids[: len(self._entries)]

    @property
    def numbers(self) -> Float32Array:
        """Their biases, repetitions and penalties: (3, entries)."""
        return self._numbers[:, : len(self._entries)]

    def read_prompt(self, tokens: Items[int]) -> None:
        """Take the prompt in, before any output."""
        if self._sampling.repetition_penalty != 1:
            for token_id in set(tokens):
                self._repeat(token_id)

    def add(self, token_id: int) -> None:
        """Take the next output token in."""
        sampling = self._sampling
        self._num_output += 1
        if sampling.repetition_penalty != 1:
            self._repeat(token_id)
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._punish(token_id)
        if self._num_output == sampling.min_tokens:
            for end in self._ends:
                self._set_bias(end)
        if self._phrases:
            self._follow_phrases(token_id)

    def _repeat(self, token_id: int) -> None:
        entry = self._entry(token_id)
        if entry is not None:
            self._numbers[1, entry] = self._sampling.repetition_penalty

    def _punish(self, token_id: int) -> None:
        entry = self._entry(token_id)
        if entry is None:
            return
        count = self._counts[token_id] = self._counts.get(token_id, 0) + 1
        # From the count and not from the last value: rebuilt rules must have the same bits.
        sampling = self._sampling
        self._numbers[2, entry] = sampling.presence_penalty + sampling.frequency_penalty * count

    def _follow_phrases(self, token_id: int) -> None:
        """Ban what would complete a phrase whose beginning ends the output."""
        self._tail = [*self._tail, token_id][-self._tail_length :]
        before = self._phrase_ends
        self._phrase_ends = {
            phrase[-1]
            for phrase in self._phrases
            if tuple(self._tail[1 - len(phrase) :]) == phrase[:-1]
        }
        for changed in before ^ self._phrase_ends:
            self._set_bias(changed)

    def _set_bias(self, token_id: int) -> None:
        is_banned = (
            token_id in self._banned
            or token_id in self._phrase_ends
            or (self._num_output < self._sampling.min_tokens and token_id in self._ends)
        )
        entry = self._entry(token_id)
        if entry is not None:
            self._numbers[0, entry] = BANNED if is_banned else self._given.get(token_id, 0.0)

    def _entry(self, token_id: int) -> int | None:
        """Place of a token's entry, a neutral one if it is new; None outside the vocabulary."""
        entry = self._entries.get(token_id)
        if entry is not None or not 0 <= token_id < self._vocab_size:
            return entry
        entry = len(self._entries)
        if entry == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._numbers = np.hstack((self._numbers, np.zeros_like(self._numbers)))
        self._entries[token_id] = entry
        self._ids[entry] = token_id
        self._numbers[:, entry] = (0.0, 1.0, 0.0)
        return entry


@dataclass(frozen=True, slots=True)
class ChangedLogits:
    """Where rules changed logits, and what stood there: `logits[rows, ids]` was `before`."""

    logits: Float32Array
    rows: Int64Array
    ids: Int64Array
    before: Float32Array

    def undo(self) -> None:
        """Put the raw logits back."""
        self.logits[self.rows, self.ids] = self.before


def apply_rules(
    logits: Float32Array, rules: Items[LogitRules], row_numbers: Items[int]
) -> ChangedLogits:
    """Change `logits` (R, vocab_size) in place; rules[i] are those of row row_numbers[i].

    One pass over the entries of all rows together: a row costs what its entries cost, whatever the
    vocabulary.
    """
    every_id = [some.ids for some in rules]
    rows = np.repeat(np.asarray(row_numbers, dtype=np.int64), [len(ids) for ids in every_id])
    ids = np.concatenate(every_id)
    biases, repetitions, penalties = np.concatenate([some.numbers for some in rules], axis=1)
    before: npt.NDArray[np.float32] = logits[rows, ids]
    values = before + biases
    values = np.where(values > 0, values / repetitions, values * repetitions)
    logits[rows, ids] = values - penalties
    return ChangedLogits(logits, rows, ids, before)
