"""A request body becomes requests that the pipeline can run: complete, tokenized, bounded."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pipeline.intake.chat_template import ChatTemplate
from pipeline.intake.errors import ContextExceeded, InvalidField, UnknownModel, UnsupportedField
from pipeline.intake.schemas import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    MessageBody,
    parse_chat,
    parse_completion,
)
from pipeline.intake.vocabulary import Vocabulary
from pipeline.protocol.request import Priority, Request
from pipeline.protocol.sampling import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
_INT64 = 2**63


class AnswerKind(StrEnum):
    """Whose shape the answer has. The value begins the answer's id."""

    CHAT = "chatcmpl"
    COMPLETION = "cmpl"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and on which terms. None: what the body says, else the intake's default."""

    tenant: str = "default"
    tenant_salt: str = ""
    priority: Priority | None = None
    queue_deadline_s: float | None = None
    total_deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One body's worth of requests.

    Choice i of the answer is requests[i]; it continues prompt i // choices_per_prompt. `ignored` are
    the fields that were passed over. `created_s` is Unix time.
    """

    answer_id: str
    kind: AnswerKind
    model: str
    created_s: int
    requests: tuple[Request, ...]
    choices_per_prompt: int = 1
    streams: bool = False
    includes_usage: bool = False
    service_tier: str | None = None
    ignored: tuple[str, ...] = field(default=())


class Intake:
    """Turns bodies into generations. Holds no state; safe in several threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: ChatTemplate,
        model: str,
        *,
        queue_deadline_s: float = 60.0,
        total_deadline_s: float = 600.0,
    ) -> None:
        self.vocabulary = vocabulary
        self.template = template
        self.model = model
        self._queue_deadline_s = queue_deadline_s
        self._total_deadline_s = total_deadline_s

    def build(
        self,
        kind: AnswerKind,
        body: Mapping[str, Any],
        caller: Caller,
        answer_id: str | None = None,
    ) -> Generation:
        """Check a parsed body and build what it asks for.

        A job takes either form (`messages` or `prompt`) and has one choice. Control tokens spelled
        out in a raw `prompt` are control tokens; in messages they are text. `answer_id` must be new
        and hard to guess; it is made here when not given.

        Raises:
            RequestRefused: any of its subclasses with status 400 or 404.
        """
        is_chat = kind is AnswerKind.CHAT or (kind is AnswerKind.JOB and "messages" in body)
        parsed: ChatBody | CompletionBody
        parsed, ignored = parse_chat(body) if is_chat else parse_completion(body)
        if parsed.model != self.model:
            raise UnknownModel(parsed.model)
        if isinstance(parsed, ChatBody):
            prompts = [self._chat_prompt(parsed.messages)]
        else:
            prompts = [self._raw_prompt(prompt) for prompt in parsed.prompt]
        if kind is AnswerKind.JOB and len(prompts) * parsed.n > 1:
            raise InvalidField(
                "n" if parsed.n > 1 else "prompt", "A job has one prompt, one answer."
            )
        answer_id = answer_id or f"{kind.value}-{secrets.token_hex(16)}"
        service_tier = body.get("service_tier")
        return Generation(
            answer_id=answer_id,
            kind=kind,
            model=parsed.model,
            created_s=int(time.time()),
            requests=tuple(
                self._requests(answer_id, parsed, prompts, _terms(caller, service_tier))
            ),
            choices_per_prompt=parsed.n,
            streams=parsed.stream,
            includes_usage=parsed.includes_usage,
            service_tier="flex" if service_tier == "flex" else service_tier and "default",
            ignored=ignored,
        )

    def _requests(
        self,
        answer_id: str,
        body: ChatBody | CompletionBody,
        prompts: list[list[int]],
        caller: Caller,
    ) -> list[Request]:
        num_choices = len(prompts) * body.n
        seed = secrets.randbits(63) if body.seed is None else body.seed
        requests = []
        for rank in range(num_choices):
            prompt = prompts[rank // body.n]
            requests.append(
                Request(
                    request_id=answer_id if num_choices == 1 else f"{answer_id}-{rank}",
                    model=body.model,
                    prompt_tokens=prompt,
                    sampling=self._sampling(body, len(prompt), seed + rank % body.n),
                    priority=body.priority if caller.priority is None else caller.priority,
                    tenant=caller.tenant,
                    tenant_salt=caller.tenant_salt,
                    queue_deadline_s=caller.queue_deadline_s or self._queue_deadline_s,
                    total_deadline_s=caller.total_deadline_s or self._total_deadline_s,
                )
            )
        return requests

    def _sampling(
        self, body: ChatBody | CompletionBody, num_prompt_tokens: int, seed: int
    ) -> SamplingParams:
        special = dict(self.vocabulary.special_texts)
        stop_ids = [*body.stop_token_ids, *(special[text] for text in body.stop if text in special)]
        if any(token_id >= self.vocabulary.vocab_size for token_id in stop_ids):
            raise InvalidField("stop_token_ids", "A token id is outside the vocabulary.")
        return SamplingParams(
            max_tokens=self._max_tokens(body, num_prompt_tokens),
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(body.top_k, 0),
            seed=(seed + _INT64) % (2 * _INT64) - _INT64,
            stop=body.stop,
            stop_token_ids=tuple(dict.fromkeys(stop_ids)),
            ignore_eos=body.ignore_eos,
            num_logprobs=_num_logprobs(body),
        )

    def _max_tokens(self, body: ChatBody | CompletionBody, num_prompt_tokens: int) -> int:
        """What was asked for, else what fits (chat) or 16 (completions).

        Raises:
            ContextExceeded: prompt and answer do not fit.
        """
        context = self.vocabulary.max_context
        left = context - num_prompt_tokens
        is_chat = isinstance(body, ChatBody)
        asked = body.max_tokens
        if isinstance(body, ChatBody) and asked is None:
            asked = body.max_completion_tokens
        if left < 1 or (asked is not None and asked > left):
            param = "messages" if is_chat else "prompt"
            raise ContextExceeded(param, context, num_prompt_tokens, 1 if asked is None else asked)
        if asked is not None:
            return asked
        return left if is_chat else min(left, DEFAULT_COMPLETION_TOKENS)

    def _chat_prompt(self, messages: Sequence[MessageBody]) -> list[int]:
        for rank, message in enumerate(messages):
            if message.tool_calls and not self.template.can_render("tool_calls"):
                raise UnsupportedField(f"messages[{rank}].tool_calls")
        plain = [message.model_dump(exclude_none=True) for message in messages]
        return self._started(self.template.encode(plain, self.vocabulary), "messages")

    def _raw_prompt(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            if max(prompt) >= self.vocabulary.vocab_size:
                raise InvalidField("prompt", "prompt has a token id outside the vocabulary.")
            return prompt
        if not prompt:
            return self._started([], "prompt")
        return [*self.vocabulary.prompt_prefix, *self.vocabulary.encode(prompt, special=True)]

    def _started(self, ids: list[int], param: str) -> list[int]:
        """An empty prompt starts from the beginning-of-text token."""
        if ids:
            return ids
        if self.vocabulary.bos_token_id is None:
            raise InvalidField(
                param, f"{param} is empty and this model has no token to start from."
            )
        return [self.vocabulary.bos_token_id]


def _num_logprobs(body: GenerationBody) -> int | None:
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else None
    return body.logprobs if isinstance(body, CompletionBody) else None


def _terms(caller: Caller, service_tier: object) -> Caller:
    """`flex` asks for the low priority, unless the caller's terms name one."""
    if service_tier != "flex" or caller.priority is not None:
        return caller
    return Caller(
        caller.tenant,
        caller.tenant_salt,
        Priority.LOW,
        caller.queue_deadline_s,
        caller.total_deadline_s,
    )
