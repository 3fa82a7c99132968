"""The prompts of a checked body as the model gets them."""

from __future__ import annotations

from pipeline.intake.chat_template import ChatTemplate, Rendering
from pipeline.intake.echo import EchoedPrompt
from pipeline.intake.errors import InvalidField, UnsupportedField
from pipeline.intake.schemas import ChatBody, CompletionBody
from pipeline.intake.vocabulary import Vocabulary


class PromptWriter:
    """Writes prompts for one model.

    Control tokens spelled out in a raw prompt are control tokens; in messages they are text.
    """

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate) -> None:
        self._vocabulary = vocabulary
        self._template = template

    def write(self, body: ChatBody | CompletionBody) -> list[list[int]]:
        """One list of ids per prompt, none empty.

        Raises:
            InvalidField, UnsupportedField, TemplateRefused: one of them cannot be made.
        """
        if isinstance(body, ChatBody):
            return [self._chat_prompt(body)]
        return [self._raw_prompt(prompt) for prompt in body.prompt]

    def echoes(
        self, body: ChatBody | CompletionBody, prompts: list[list[int]]
    ) -> tuple[EchoedPrompt, ...]:
        """The prompts that an answer shows again."""
        if not isinstance(body, CompletionBody) or not body.echo:
            return ()
        num_added = len(self._vocabulary.prompt_prefix)
        return tuple(
            EchoedPrompt(given, tuple(tokens), num_added if given else len(tokens))
            if isinstance(given, str)
            else EchoedPrompt.of_tokens(tokens, self._vocabulary)
            for given, tokens in zip(body.prompt, prompts, strict=True)
        )

    def _chat_prompt(self, body: ChatBody) -> list[int]:
        for rank, message in enumerate(body.messages):
            if message.tool_calls and not self._template.can_render("tool_calls"):
                raise UnsupportedField(f"messages[{rank}].tool_calls")
        if body.offered and not self._template.can_render("tools"):
            raise UnsupportedField("tools")
        plain = [message.model_dump(exclude_none=True) for message in body.messages]
        return self._started(
            self._template.encode(plain, self._vocabulary, self._rendering(body)), "messages"
        )

    def _rendering(self, body: ChatBody) -> Rendering:
        more = body.chat_template_kwargs
        if more and not self._template.takes_kwargs:
            raise UnsupportedField("chat_template_kwargs")
        if any(self._template.is_reserved(name) for name in more):
            raise InvalidField(
                "chat_template_kwargs", "chat_template_kwargs has a name that is not for clients."
            )
        opens_answer = body.add_generation_prompt is not False and not body.continue_final_message
        if body.offered:
            more = more | {"tools": [tool.for_template() for tool in body.tools]}
        return Rendering(opens_answer, body.continue_final_message, more)

    def _raw_prompt(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            if max(prompt) >= self._vocabulary.vocab_size:
                raise InvalidField("prompt", "prompt has a token id outside the vocabulary.")
            return prompt
        if not prompt:
            return self._started([], "prompt")
        ids = self._vocabulary.encode(prompt, special=True)
        # In place: to copy millions of ids keeps all other threads waiting.
        ids[:0] = self._vocabulary.prompt_prefix
        return ids

    def _started(self, ids: list[int], param: str) -> list[int]:
        """An empty prompt starts from the beginning-of-text token."""
        if ids:
            return ids
        if self._vocabulary.bos_token_id is None:
            raise InvalidField(
                param, f"{param} is empty and this model has no token to start from."
            )
        return [self._vocabulary.bos_token_id]
