"""What a body says of sampling, resolved against a vocabulary and a prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pipeline.intake.answer_plan import AnswerPlan
from pipeline.intake.errors import ContextExceeded, InvalidField
from pipeline.intake.schemas import ChatBody, CompletionBody, GenerationBody
from pipeline.intake.vocabulary import Vocabulary
from pipeline.protocol.sampling import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_INT64 = 2**63


def build_sampling(
    body: ChatBody | CompletionBody,
    vocabulary: Vocabulary,
    num_prompt_tokens: int,
    seed: int,
    plan: AnswerPlan,
) -> SamplingParams:
    """Sampling of one choice; `seed` may run over 64 bits and wraps.

    Raises:
        InvalidField: a token id is outside the vocabulary, min_tokens is above max_tokens.
        ContextExceeded: prompt and answer do not fit.
    """
    special = dict(vocabulary.special_texts)
    stop_ids = [*body.stop_token_ids, *(special[text] for text in body.stop if text in special)]
    for name, token_ids in (("stop_token_ids", stop_ids), ("logit_bias", body.logit_bias)):
        if any(token_id >= vocabulary.vocab_size for token_id in token_ids):
            raise InvalidField(name, f"{name} has a token id outside the vocabulary.")
    max_tokens = _max_tokens(body, vocabulary.max_context, num_prompt_tokens)
    if body.min_tokens > max_tokens:
        raise InvalidField("min_tokens", f"min_tokens must be at most max_tokens, {max_tokens}.")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        seed=(seed + _INT64) % (2 * _INT64) - _INT64,
        stop=body.stop,
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        ignore_eos=body.ignore_eos,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=tuple(body.logit_bias.items()),
        min_tokens=body.min_tokens,
        grammar=plan.grammar,
        bad_words=_bad_words(body.bad_words, vocabulary),
        skip_special_tokens=body.skip_special_tokens and not plan.shows_special,
        include_stop_str_in_output=body.include_stop_str_in_output,
        uses_cache=body.cache,
        cache_salt=hashlib.sha256(body.cache_salt.encode()).hexdigest() if body.cache_salt else "",
        continues_text=isinstance(body, ChatBody) and body.continue_final_message,
        echo=isinstance(body, CompletionBody) and body.echo,
        num_logprobs=num_logprobs_of(body),
    )


def num_logprobs_of(body: GenerationBody) -> int | None:
    """Alternatives wanted for each token; None: no log-probabilities at all."""
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs if isinstance(body, CompletionBody) else None


def _max_tokens(body: ChatBody | CompletionBody, max_context: int, num_prompt_tokens: int) -> int:
    """What was asked for, else what fits (chat) or 16 (completions)."""
    left = max_context - num_prompt_tokens
    is_chat = isinstance(body, ChatBody)
    asked = body.max_tokens
    if isinstance(body, ChatBody) and asked is None:
        asked = body.max_completion_tokens
    wanted = 1 if asked is None else asked
    if left < wanted:
        raise ContextExceeded(
            "messages" if is_chat else "prompt", max_context, num_prompt_tokens, wanted
        )
    if asked is not None:
        return asked
    return left if is_chat else min(left, DEFAULT_COMPLETION_TOKENS)


def _bad_words(words: Sequence[str], vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens, as it stands at the start of a text and behind a space."""
    spelled = [
        tuple(vocabulary.encode(text, special=False))
        for word in words
        for text in (word, f" {word.lstrip()}")
    ]
    return tuple(dict.fromkeys(ids for ids in spelled if ids))
