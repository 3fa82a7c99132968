"""When a sequence ends by itself, and with which word."""

from __future__ import annotations

from pipeline.protocol.failure import Ending, FailureCode, FinishReason
from workers.model import ModelSpec
from workers.sequence import Sequence
from workers.stop_matching import StopMatcher

STOP = Ending(reason=FinishReason.STOP)
LENGTH = Ending(reason=FinishReason.LENGTH)
CANCELLED = Ending(reason=FinishReason.CANCELLED)
LATE = Ending(failure=FailureCode.DEADLINE_EXCEEDED)
UNFIT = Ending(failure=FailureCode.CONTEXT_EXCEEDED)
NO_ROOM = Ending(failure=FailureCode.NO_WORKERS)
BROKEN = Ending(failure=FailureCode.INTERNAL_ERROR)


def ending_at_start(
    sequence: Sequence, matcher: StopMatcher | None, spec: ModelSpec
) -> Ending | None:
    """The ending of a sequence that cannot run, or was brought to its end before; else None.

    An earlier attempt may have died between its last token and its ending. Feeds the logged tokens
    to the matcher, so that stop strings that span attempts are found. A prompt to be scored runs
    even where no token may follow it.
    """
    tokens = sequence.tokens
    if not tokens or min(tokens) < 0 or max(tokens) >= spec.vocab_size:
        return BROKEN  # in a step it would take others down with it
    if sequence.sampling.grammar and sequence.grammar is None:
        return BROKEN  # never an answer that leaves out in silence what was asked for
    for token_id in sequence.tokens[sequence.num_prompt_tokens :]:
        if matcher is not None and matcher.feed(token_id):
            return STOP
    if sequence.grammar is not None and sequence.grammar.is_complete:
        return STOP
    is_unscored = sequence.sampling.scores_prompt and not sequence.num_generated
    if is_unscored and len(tokens) <= spec.context_tokens:
        return None
    return ending_by_length(sequence, spec)


def is_end_token(sequence: Sequence, token_id: int, spec: ModelSpec) -> bool:
    """True for end-of-text and stop tokens: they end the output and are no part of it."""
    is_eos = token_id in spec.eos_token_ids and not sequence.sampling.ignore_eos
    return is_eos or token_id in sequence.sampling.stop_token_ids


def ending_after_token(
    sequence: Sequence, matcher: StopMatcher | None, spec: ModelSpec
) -> Ending | None:
    """The ending that the newest output token brings about, or None."""
    if matcher is not None and matcher.feed(sequence.tokens[-1]):
        return STOP
    if sequence.grammar is not None:
        sequence.grammar.take(sequence.tokens[-1])
        if sequence.grammar.is_complete:
            return STOP
    return ending_by_length(sequence, spec)


def ending_by_length(sequence: Sequence, spec: ModelSpec) -> Ending | None:
    """`length` if no token may follow those that are there, or None."""
    is_full = len(sequence.tokens) >= spec.context_tokens
    return LENGTH if is_full or sequence.num_generated >= sequence.sampling.max_tokens else None
