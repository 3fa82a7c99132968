"""Messages to prompt ids through the model's own chat template, in a sandbox."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Self

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.intake.errors import ModelFilesUnusable, TemplateRefused
from pipeline.intake.hf_vocabulary import read_json, token_content
from pipeline.intake.vocabulary import Vocabulary

Message = Mapping[str, Any]

# ChatML, spoken by the test engines and by models that bring no template of their own.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_NONCE_DIGITS = 24
_RANK_DIGITS = 4


class _RaisedByTemplate(jinja2.TemplateError):
    """The template called raise_exception."""


class ChatTemplate:
    """Renders conversations.

    Every answer starts a new assistant turn, also after a conversation that ends with one. Control
    tokens that a client typed into a message stay plain text (see `encode`).
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        """`tokens` are bos_token, eos_token and the like, as the template may name them.

        Raises:
            jinja2.TemplateSyntaxError: the template is broken.
        """
        self.source = source
        self._tokens = dict(tokens or {})
        self._template = _environment().from_string(source)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """From chat_template.jinja, else tokenizer_config.json, else ChatML.

        Raises:
            ModelFilesUnusable: a file is broken.
        """
        config = read_json(directory / "tokenizer_config.json")
        path = directory / "chat_template.jinja"
        source = path.read_text("utf-8") if path.is_file() else _default_of(config)
        named = {
            key: token_content(value) for key, value in config.items() if key.endswith("_token")
        }
        try:
            return cls(source, {key: text for key, text in named.items() if text is not None})
        except jinja2.TemplateSyntaxError as error:
            raise ModelFilesUnusable(directory, f"chat template, line {error.lineno}") from error

    def can_render(self, field: str) -> bool:
        """True when the template looks at this field of a message."""
        return field in self.source

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, ready for the assistant's turn.

        Raises:
            TemplateRefused: the template raised; its own words are kept, its source is not.
        """
        try:
            return self._template.render(
                messages=messages, tools=None, add_generation_prompt=True, **self._tokens
            )
        except _RaisedByTemplate as error:
            text = re.sub(r"\{[%{#].*?[%}#]\}", "", error.message or "")
            raise TemplateRefused(f"The chat template refuses these messages: {text}") from error
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TemplateRefused("The chat template cannot render these messages.") from error

    def encode(self, messages: Sequence[Message], vocabulary: Vocabulary) -> list[int]:
        """Prompt ids of a conversation.

        Control tokens written by the template become their ids; the same characters inside a
        message are hidden behind random digits while the template runs, and encoded as text.

        Raises:
            TemplateRefused: see `render`.
        """
        ids_of = dict(vocabulary.special_texts)
        if not ids_of:
            return vocabulary.encode(self.render(messages), special=True)
        pattern = re.compile("|".join(re.escape(text) for text in ids_of))
        mask = _Mask(pattern)
        masked = [mask.hide(message) for message in messages]
        rendered = self.render(masked)
        if not mask.hidden:
            return vocabulary.encode(rendered, special=True)
        ids: list[int] = []
        start = 0
        for match in pattern.finditer(rendered):
            ids += vocabulary.encode(mask.reveal(rendered[start : match.start()]), special=False)
            ids.append(ids_of[match.group()])
            start = match.end()
        return ids + vocabulary.encode(mask.reveal(rendered[start:]), special=False)


class _Mask:
    """Swaps matches of a pattern for digits that no client can foresee, and back."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._nonce = "".join(secrets.choice("0123456789") for _ in range(_NONCE_DIGITS))
        self._marked = re.compile(f"{self._nonce}([0-9]{{{_RANK_DIGITS}}})")
        self.hidden: dict[str, int] = {}

    def hide(self, value: Any) -> Any:
        """A copy of a JSON value with every match in every string swapped."""
        if isinstance(value, str):
            return self._pattern.sub(self._mark, value)
        if isinstance(value, Mapping):
            return {key: self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def reveal(self, text: str) -> str:
        """The text with the matches back in their places."""
        texts = list(self.hidden)
        return self._marked.sub(lambda match: texts[int(match.group(1))], text)

    def _mark(self, match: re.Match[str]) -> str:
        rank = self.hidden.setdefault(match.group(), len(self.hidden))
        return f"{self._nonce}{rank:0{_RANK_DIGITS}d}"


def _default_of(config: Mapping[str, Any]) -> str:
    """The `chat_template` entry, which is a string or a list of named ones."""
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else CHATML


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    helpers: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(helpers)
    return environment


def _to_json(value: object, indent: int | None = None) -> str:
    """Plain JSON: the filter of jinja2 escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise _RaisedByTemplate(str(message))


def _strftime_now(pattern: str) -> str:
    """The date of this machine, as Hugging Face templates expect it."""
    return datetime.now().astimezone().strftime(pattern)
