"""Grammars that an answer must obey, and which tokens each lets follow.

A grammar is one JSON text: it travels in the sampling of a request, is checked where the request is
built, and compiled again by each worker that runs it. Where a sequence stands in its grammar follows
from its tokens alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from pipeline.intake.vocabulary import Vocabulary

MAX_GRAMMAR_BYTES = 64 * 1024
MAX_COMPILED = 64
_MAX_REASON_CHARS = 200
# One form of white space and no choice of it: small models lose themselves in line ends otherwise.
_JSON_FORM: Final[Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}


class GrammarRefused(Exception):
    """A grammar that is broken, too large, or asks for what cannot be held; `reason` is a clause."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class GrammarBroken(Exception):
    """A sequence has left its grammar, or its next step costs more than one may."""


def json_schema_grammar(schema: dict[str, Any]) -> str:
    """The grammar of JSON texts that a schema takes, in its order of properties.

    Raises:
        GrammarRefused: it is too large, or nested too deeply.
    """
    try:
        text = orjson.dumps(schema).decode()
        return _bounded(LLMatcher.grammar_from_json_schema(text, overrides=_JSON_FORM))
    except (orjson.JSONEncodeError, ValueError) as error:
        raise GrammarRefused("is nested too deeply") from error


def json_schema_rule(schema: dict[str, Any]) -> str:
    """The same as the right side of a rule in a grammar of several rules.

    Raises:
        GrammarRefused: it is nested too deeply.
    """
    try:
        return f"%json {orjson.dumps(schema | {'x-guidance': _JSON_FORM}).decode()}"
    except orjson.JSONEncodeError as error:
        raise GrammarRefused("is nested too deeply") from error


class TokenGrammar:
    """Where one sequence stands in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, end_mask: bytes) -> None:
        """Raises `GrammarBroken`."""
        self._matcher = matcher
        self._end_mask = end_mask
        self._mask = self._next_mask()

    @property
    def allowed(self) -> bytes:
        """A bit per token id, lowest first, padded to 32: set where the token may follow."""
        return self._mask

    @property
    def is_complete(self) -> bool:
        """True when nothing but the end may follow."""
        return self._mask == self._end_mask

    def take(self, token_id: int) -> None:
        """Move on by one token. Raises `GrammarBroken`."""
        self._matcher.consume_token(token_id)
        self._mask = self._next_mask()

    def _next_mask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarBroken
        return mask


class GrammarBook:
    """Compiles grammars for one vocabulary and keeps the latest. Safe in several threads.

    What the compiler knows of the vocabulary is made on first use: it takes a moment, and most
    servers are never asked.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._limits = LLParserLimits(verbose_errors=False)
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._end_mask = _mask_of(vocabulary.eos_token_ids, vocabulary.vocab_size)

    def check(self, grammar: str) -> None:
        """Compile a grammar and take its first step. Raises `GrammarRefused`."""
        self.start(grammar)

    def start(self, grammar: str, tokens: Sequence[int] = ()) -> TokenGrammar:
        """A sequence at the beginning of its grammar, or behind the `tokens` that it has already.

        Raises:
            GrammarRefused: see there.
            GrammarBroken: the tokens do not obey.
        """
        matcher = self._find(grammar).deep_copy()
        try:
            fresh = TokenGrammar(matcher, self._end_mask)
        except GrammarBroken as error:
            raise GrammarRefused(_reason(matcher)) from error
        if not tokens:
            return fresh
        if not matcher.consume_tokens(list(tokens)):
            raise GrammarBroken
        return TokenGrammar(matcher, self._end_mask)

    def _find(self, grammar: str) -> LLMatcher:
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known
        _bounded(grammar)
        matcher = LLMatcher(self._find_tokenizer(), grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarRefused(_reason(matcher))
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def _find_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(
                    TokenizerWrapper(_Spelling(self._vocabulary)),
                    n_vocab=self._vocabulary.vocab_size,
                    eos_token=sorted(self._vocabulary.eos_token_ids),
                    slices=LLTokenizer.json_slices(),
                )
            return self._tokenizer


class _Spelling:
    """A vocabulary as the compiler wants to see it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        token_ids = range(vocabulary.vocab_size)
        self._vocabulary = vocabulary
        self.eos_token_id = min(vocabulary.eos_token_ids)
        self.bos_token_id = vocabulary.bos_token_id
        self.tokens = [vocabulary.token_bytes(token_id) for token_id in token_ids]
        self.special_token_ids = [
            token_id for token_id in token_ids if vocabulary.is_special(token_id)
        ]

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.encode(text, special=False)


def _mask_of(token_ids: frozenset[int], vocab_size: int) -> bytes:
    bits = sum(1 << token_id for token_id in token_ids)
    return bits.to_bytes((vocab_size + 31) // 32 * 4, "little")


def _bounded(grammar: str) -> str:
    num_bytes = len(grammar.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise GrammarRefused(f"has {num_bytes} bytes, more than {MAX_GRAMMAR_BYTES}")
    return grammar


def _reason(matcher: LLMatcher) -> str:
    """The compiler's first line: the rest draws the client's own text again."""
    line = matcher.get_error().partition("\n")[0]
    return f"cannot be held: {line[:_MAX_REASON_CHARS]}"
