"""A request body becomes requests that the pipeline can run: complete, tokenized, bounded."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from pipeline.intake.answer_plan import AnswerPlan, AnswerPlanner
from pipeline.intake.chat_template import ChatTemplate
from pipeline.intake.echo import EchoedPrompt
from pipeline.intake.errors import InvalidField, UnsupportedField
from pipeline.intake.prompt_writer import PromptWriter
from pipeline.intake.sampling_options import build_sampling, num_logprobs_of
from pipeline.intake.schemas import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    parse_chat,
    parse_completion,
)
from pipeline.intake.tool_calls import ToolRules
from pipeline.intake.vocabulary import Vocabulary
from pipeline.protocol.request import JobTerms, Priority, Request


class AnswerKind(StrEnum):
    """Whose shape the answer has. The value begins the answer's id."""

    CHAT = "chatcmpl"
    COMPLETION = "cmpl"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and on which terms. None: what the body says, else the intake's default.

    `models` are the names that the caller may ask for; None: all.
    """

    tenant: str = "default"
    tenant_salt: str = ""
    priority: Priority | None = None
    queue_deadline_s: float | None = None
    total_deadline_s: float | None = None
    models: frozenset[str] | None = None

    def may_use(self, model: str) -> bool:
        """Whether the caller may ask for a model by this name."""
        return self.models is None or model in self.models


@dataclass(frozen=True, slots=True)
class Generation:
    """One body's worth of requests.

    `model` is the name that was asked for, `vocabulary` the model's. Choice i of the answer is
    requests[i]; it continues prompt i // choices_per_prompt. `ignored` are the fields that were
    passed over. `echoes` are the prompts to show again, none unless asked for. `tools` says how calls
    are read out of the text, if there may be any. `fingerprint` says which weights and program answer, ""
    if that is not known. `created_s` is Unix time.
    """

    answer_id: str
    kind: AnswerKind
    model: str
    created_s: int
    requests: tuple[Request, ...]
    vocabulary: Vocabulary
    choices_per_prompt: int = 1
    streams: bool = False
    includes_usage: bool = False
    counts_usage: bool = False
    echoes: tuple[EchoedPrompt, ...] = ()
    service_tier: str | None = None
    tools: ToolRules | None = None
    fingerprint: str = ""
    ignored: tuple[str, ...] = field(default=())

    def as_job(self, terms: JobTerms) -> Generation:
        """The same work, to be found again by its id."""
        return replace(self, requests=tuple(replace(item, job=terms) for item in self.requests))

    def ignoring(self, names: tuple[str, ...]) -> Generation:
        """The same work, where these fields were passed over."""
        return replace(self, ignored=names)

    def echo_of(self, index: int) -> EchoedPrompt | None:
        """The prompt that choice `index` begins with, or None."""
        return self.echoes[index // self.choices_per_prompt] if self.echoes else None


class Intake:
    """Turns bodies into generations, whatever name they call its model by. Safe in several threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: ChatTemplate,
        model: str,
        *,
        queue_deadline_s: float = 60.0,
        total_deadline_s: float = 600.0,
        batch_deadline_s: float = 86_400.0,
    ) -> None:
        self.vocabulary = vocabulary
        self.model = model
        self._prompts = PromptWriter(vocabulary, template)
        self._plans = AnswerPlanner(vocabulary, template.source)
        self._queue_deadline_s = queue_deadline_s
        self._total_deadline_s = total_deadline_s
        self._batch_deadline_s = batch_deadline_s

    def build(
        self,
        kind: AnswerKind,
        body: Mapping[str, Any],
        caller: Caller,
        answer_id: str | None = None,
    ) -> Generation:
        """Check a parsed body and build what it asks for.

        A job takes either form (`messages` or `prompt`) and has one choice without
        log-probabilities. Control tokens spelled out in a raw `prompt` are control tokens; in
        messages they are text. `answer_id` must be new and hard to guess; it is made here when not
        given.

        Raises:
            RequestRefused: any of its subclasses with status 400.
        """
        is_job = kind is AnswerKind.JOB
        # null is absent here too
        is_chat = body.get("messages") is not None if is_job else kind is AnswerKind.CHAT
        parsed: ChatBody | CompletionBody
        parsed, ignored = parse_chat(body) if is_chat else parse_completion(body)
        prompts = self.prompts_of(parsed)
        plan = self._plans.plan(parsed)
        if is_job:
            _check_job(parsed, len(prompts))
        answer_id = answer_id or f"{kind.value}-{secrets.token_hex(16)}"
        service_tier = body.get("service_tier")
        return Generation(
            answer_id=answer_id,
            kind=kind,
            model=parsed.model,
            created_s=int(time.time()),
            requests=tuple(
                self._requests(answer_id, parsed, prompts, plan, _terms(caller, service_tier))
            ),
            vocabulary=self.vocabulary,
            choices_per_prompt=parsed.n,
            streams=parsed.stream,
            includes_usage=parsed.includes_usage,
            counts_usage=parsed.counts_usage,
            echoes=self._prompts.echoes(parsed, prompts),
            service_tier="flex" if service_tier == "flex" else service_tier and "default",
            tools=plan.tools,
            ignored=ignored,
        )

    def prompts_of(self, body: ChatBody | CompletionBody) -> list[list[int]]:
        """See `PromptWriter.write`."""
        return self._prompts.write(body)

    def _requests(
        self,
        answer_id: str,
        body: ChatBody | CompletionBody,
        prompts: list[list[int]],
        plan: AnswerPlan,
        caller: Caller,
    ) -> list[Request]:
        num_choices = len(prompts) * body.n
        seed = secrets.randbits(63) if body.seed is None else body.seed
        priority = body.priority if caller.priority is None else caller.priority
        queue_deadline_s, total_deadline_s = self._deadlines_s(priority)
        requests = []
        for rank in range(num_choices):
            prompt = prompts[rank // body.n]
            requests.append(
                Request(
                    request_id=answer_id if num_choices == 1 else f"{answer_id}-{rank}",
                    model=self.model,
                    prompt_tokens=prompt,
                    sampling=build_sampling(
                        body, self.vocabulary, len(prompt), seed + rank % body.n, plan
                    ),
                    priority=priority,
                    tenant=caller.tenant,
                    tenant_salt=caller.tenant_salt,
                    queue_deadline_s=caller.queue_deadline_s or queue_deadline_s,
                    total_deadline_s=caller.total_deadline_s or total_deadline_s,
                )
            )
        return requests

    def _deadlines_s(self, priority: Priority) -> tuple[float, float]:
        """(In the queue, in all): what waits behind everybody else gets the time for it."""
        if priority is Priority.BATCH:
            return self._batch_deadline_s, self._batch_deadline_s
        return self._queue_deadline_s, self._total_deadline_s


def _check_job(body: GenerationBody, num_prompts: int) -> None:
    """Refuse what the answer of a job has no place for."""
    if num_prompts * body.n > 1:
        raise InvalidField("n" if body.n > 1 else "prompt", "A job has one prompt, one answer.")
    if num_logprobs_of(body) is not None:
        raise UnsupportedField("logprobs")
    if isinstance(body, CompletionBody) and body.echo:
        raise UnsupportedField("echo")


def _terms(caller: Caller, service_tier: object) -> Caller:
    """`flex` asks for the low priority, unless the caller's terms name one."""
    if service_tier != "flex" or caller.priority is not None:
        return caller
    return replace(caller, priority=Priority.LOW)
