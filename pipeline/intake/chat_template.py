"""Messages to prompt ids through the model's own chat template, in a sandbox."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
# What a template gets from us, and no client may set.
RESERVED_NAMES = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("raise_exception", "strftime_now"),
    }
)
_NONCE_DIGITS = 24
_RANK_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a conversation is written.

    opens_answer: the assistant's turn is opened after it. continues_last: instead, the text ends
    within its last message, which the answer goes on with. more: what the template may look at
    beside messages; no name of `RESERVED_NAMES`.
    """

    opens_answer: bool = True
    continues_last: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


PLAIN = Rendering()
_STUMBLES = (
    *(jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError),
)


class _RaisedByTemplate(jinja2.TemplateError):
    """The template called raise_exception."""


class ChatTemplate:
    """Renders conversations.

    An answer starts a new assistant turn, also after a conversation that ends with one, unless the
    `Rendering` says otherwise. Control tokens that a client typed stay plain text (see `encode`).
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str] | None = None, *, takes_kwargs: bool = True
    ) -> None:
        """`tokens` are bos_token, eos_token and the like, as the template may name them.

        takes_kwargs: clients may pass values of their own.

        Raises:
            jinja2.TemplateSyntaxError: the template is broken.
        """
        self.source = source
        self.takes_kwargs = takes_kwargs
        self._tokens = dict(tokens or {})
        self._template = _environment().from_string(source)

    @classmethod
    def load(
        cls, directory: Path | None, file: Path | None = None, *, takes_kwargs: bool = True
    ) -> Self:
        """From `file`, else the model's chat_template.jinja, tokenizer_config.json, else ChatML.

        Raises:
            ModelFilesUnusable: a file is broken, or there is no `file`.
        """
        config = {} if directory is None else read_json(directory / "tokenizer_config.json")
        source = _find_source(directory, file, config)
        named = {
            key: token_content(value) for key, value in config.items() if key.endswith("_token")
        }
        try:
            tokens = {key: text for key, text in named.items() if text is not None}
            return cls(source, tokens, takes_kwargs=takes_kwargs)
        except jinja2.TemplateSyntaxError as error:
            place = file or directory or Path()
            raise ModelFilesUnusable(place, f"chat template, line {error.lineno}") from error

    def can_render(self, field: str) -> bool:
        """True when the template looks at this field of a message."""
        return field in self.source

    def is_reserved(self, name: str) -> bool:
        """True for a name that `Rendering.more` may not have."""
        return name in RESERVED_NAMES or name in self._tokens

    def render(self, messages: Sequence[Message], how: Rendering = PLAIN) -> str:
        """The conversation as text; `continues_last` is not seen to.

        Raises:
            TemplateRefused: the template raised; its own words are kept, its source is not.
        """
        try:
            return self._template.render(
                {"tools": None}
                | dict(how.more)
                | {"messages": messages, "add_generation_prompt": how.opens_answer}
                | self._tokens
            )
        except _RaisedByTemplate as error:
            text = re.sub(r"\{[%{#].*?[%}#]\}", "", error.message or "")
            raise TemplateRefused(f"The chat template refuses these messages: {text}") from error
        except _STUMBLES as error:
            raise TemplateRefused("The chat template cannot render these messages.") from error

    def encode(
        self, messages: Sequence[Message], vocabulary: Vocabulary, how: Rendering = PLAIN
    ) -> list[int]:
        """Prompt ids of a conversation.

        Control tokens written by the template become their ids; the same characters in what a
        client sent are hidden behind random digits while the template runs, and encoded as text.

        Raises:
            TemplateRefused: see `render`; or the last message, to be continued, is not shown whole.
        """
        ids_of = dict(vocabulary.special_texts)
        mask = _Mask(list(ids_of))
        try:
            masked = [mask.hide(message) for message in messages]
            how = replace(how, more=mask.hide(how.more))
        except RecursionError as error:
            raise TemplateRefused("The messages are nested too deeply.") from error
        if how.continues_last:
            masked[-1] |= {"content": f"{masked[-1]['content']}{mask.end}"}
        rendered = self.render(masked, how)
        if how.continues_last:
            rendered, end, _ = rendered.rpartition(mask.end)
            if not end:
                raise TemplateRefused("The chat template cannot leave the last message open.")
        parts: list[str | int] = []
        start = 0
        for match in mask.pattern.finditer(rendered):
            parts += [mask.reveal(rendered[start : match.start()]), ids_of[match.group()]]
            start = match.end()
        return vocabulary.encode_parts([*parts, mask.reveal(rendered[start:])])


class _Mask:
    """Swaps control tokens for digits that no client can foresee, and back.

    So does it with the beginning of one at the end of a string: the template may put another
    string behind it that completes it. `end` marks a place and stands for nothing.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._beginnings = {text[:length] for text in texts for length in range(1, len(text))}
        self._max_chars = max(map(len, self._beginnings), default=0)
        self._nonce = "".join(secrets.choice("0123456789") for _ in range(_NONCE_DIGITS))
        self._marked = re.compile(f"{self._nonce}([0-9]{{{_RANK_DIGITS}}})")
        self._hidden: dict[str, int] = {}
        self.end = self._mark("")

    def hide(self, value: Any) -> Any:
        """A copy of a JSON value with every match in every string swapped, also in keys."""
        if isinstance(value, str):
            return self._hide_end(self.pattern.sub(lambda match: self._mark(match.group()), value))
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def reveal(self, text: str) -> str:
        """The text with the matches back in their places."""
        texts = list(self._hidden)
        return self._marked.sub(lambda match: texts[int(match.group(1))], text)

    def _hide_end(self, text: str) -> str:
        for num_chars in range(min(self._max_chars, len(text)), 0, -1):
            if text[-num_chars:] in self._beginnings:
                return text[:-num_chars] + self._mark(text[-num_chars:])
        return text

    def _mark(self, text: str) -> str:
        rank = self._hidden.setdefault(text, len(self._hidden))
        return f"{self._nonce}{rank:0{_RANK_DIGITS}d}"


def _find_source(directory: Path | None, file: Path | None, config: Mapping[str, Any]) -> str:
    if file is None and directory is not None:
        path = directory / "chat_template.jinja"
        file = path if path.is_file() else None
    if file is None:
        return _default_of(config)
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ModelFilesUnusable(file, "cannot be read") from error


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
