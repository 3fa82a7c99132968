"""Which fields of a body are supported, passed over with a warning, or refused, by name.

The table of OpenAI's fields and the vendor fields that load tools and vLLM's users send. null is
absent everywhere. An unknown field is refused: it may change the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.intake.errors import InvalidField, UnsupportedField

MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512

IGNORED_BY_BOTH = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    }
)
# Refused, unless they hold one of these values, which change nothing.
_NEUTRAL_IN_BOTH: dict[str, tuple[object, ...]] = {
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "lora": (),
    "kv_transfer_params": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}


@dataclass(frozen=True, slots=True)
class FieldPolicy:
    """What becomes of each field of one route's body."""

    supported: frozenset[str]
    ignored: frozenset[str]
    neutral: Mapping[str, tuple[object, ...]]

    def screen(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The supported fields that are set, and the names of those passed over.

        Raises:
            UnsupportedField: a field would change the answer.
            InvalidField: a field that is passed over breaks its own limits.
        """
        kept: dict[str, Any] = {}
        ignored: list[str] = []
        for name, value in body.items():
            if value is None:
                continue
            if name in self.supported:
                kept[name] = value
            elif name in self.ignored:
                _check_ignored(name, value)
                ignored.append(name)
            elif not self._is_neutral(name, value, body):
                raise UnsupportedField(name)
        return kept, tuple(ignored)

    def _is_neutral(self, name: str, value: object, body: Mapping[str, Any]) -> bool:
        if name == "best_of":
            num_choices = body.get("n")  # null is absent
            return _is_same(value, 1 if num_choices is None else num_choices)
        return any(_is_same(value, neutral) for neutral in self.neutral.get(name, ()))


def _is_same(value: object, neutral: object) -> bool:
    """Equality that keeps booleans and numbers apart."""
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def _check_ignored(name: str, value: object) -> None:
    if name in ("user", "safety_identifier", "prompt_cache_key") and not isinstance(value, str):
        raise InvalidField(name, f"{name} must be a string.")
    if name == "metadata":
        check_metadata(value)
    if name == "service_tier" and value not in ("auto", "default", "flex"):
        raise InvalidField(name, "service_tier must be auto, default or flex.")


def check_metadata(value: object) -> None:
    """Raise `InvalidField` for what is not a few short texts."""
    if not isinstance(value, dict) or len(value) > MAX_METADATA_PAIRS:
        raise InvalidField("metadata", f"metadata must be at most {MAX_METADATA_PAIRS} pairs.")
    for key, text in value.items():
        if not isinstance(text, str):
            raise InvalidField("metadata", "metadata values must be strings.")
        if len(key) > MAX_METADATA_KEY_CHARS or len(text) > MAX_METADATA_VALUE_CHARS:
            raise InvalidField("metadata", "a metadata key or value is too long.")


_SUPPORTED_BY_BOTH = frozenset(
    {
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "min_tokens",
        "bad_words",
        "skip_special_tokens",
        "include_stop_str_in_output",
        "stream",
        "stream_options",
        "n",
        "logprobs",
        "priority",
        "cache",
        "cache_salt",
    }
)

COMPLETION_FIELDS = FieldPolicy(
    supported=_SUPPORTED_BY_BOTH | {"prompt", "echo"},
    ignored=IGNORED_BY_BOTH,
    neutral={**_NEUTRAL_IN_BOTH, "suffix": ("",), "prompt_embeds": ()},
)

CHAT_FIELDS = FieldPolicy(
    supported=_SUPPORTED_BY_BOTH
    | {"messages", "max_completion_tokens", "top_logprobs", "response_format"}
    | {"tools", "tool_choice", "parallel_tool_calls"}
    | {"add_generation_prompt", "continue_final_message", "chat_template_kwargs"},
    ignored=IGNORED_BY_BOTH | {"prediction", "reasoning_effort", "verbosity"},
    neutral={
        **_NEUTRAL_IN_BOTH,
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "moderation": (),
        "echo": (False,),
        "chat_template": (),
    },
)
