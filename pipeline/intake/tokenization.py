"""Text to token ids and back, as a generation would have it: /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field

from pipeline.intake.build import Intake
from pipeline.intake.detokenizer import Detokenizer, TextRules
from pipeline.intake.errors import InvalidField, UnsupportedField
from pipeline.intake.field_types import TokenIds
from pipeline.intake.schemas import Strict, parse_chat, parse_completion, validate

# What decides how a prompt is written; everything else of a generation has no part here.
_PROMPT_FIELDS = frozenset(
    {
        "model",
        "prompt",
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
    }
)
_OWN_FIELDS = ("add_special_tokens", "return_token_strs")


class TokenizeShape(BaseModel):
    """The fields of a body beside those that make the prompt."""

    model_config = Strict

    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeShape(BaseModel):
    """The whole body of /detokenize."""

    model_config = Strict

    model: Annotated[str, Field(min_length=1)]
    tokens: TokenIds


def tokenize(find: Callable[[str], Intake], body: Mapping[str, Any]) -> dict[str, Any]:
    """The ids that a completion (`prompt`) or a chat (`messages`) would be computed from.

    `find` gives the model of a name. `add_special_tokens` false leaves out what the model wants
    before a raw prompt.

    Raises:
        RequestRefused: any of its subclasses with status 400 or 404; also what `find` raises.
    """
    options = validate(TokenizeShape, {k: body[k] for k in _OWN_FIELDS if body.get(k) is not None})
    rest = {name: value for name, value in body.items() if name not in _OWN_FIELDS}
    for name, value in rest.items():
        if name not in _PROMPT_FIELDS and value is not None:
            raise UnsupportedField(name)
    is_chat = rest.get("messages") is not None
    parsed = parse_chat(rest)[0] if is_chat else parse_completion(rest)[0]
    intake = find(parsed.model)
    prompts = intake.prompts_of(parsed)
    if len(prompts) > 1:
        raise InvalidField("prompt", "prompt must be one prompt.")
    ids, prefix = prompts[0], list(intake.vocabulary.prompt_prefix)
    if not is_chat and not options.add_special_tokens and isinstance(rest.get("prompt"), str):
        ids = ids[len(prefix) :] if rest["prompt"] else []
    answer = {"count": len(ids), "max_model_len": intake.vocabulary.max_context, "tokens": ids}
    if options.return_token_strs:
        spelled = [intake.vocabulary.token_bytes(token_id) for token_id in ids]
        answer["token_strs"] = [text.decode("utf-8", "replace") for text in spelled]
    return answer


def detokenize(find: Callable[[str], Intake], body: Mapping[str, Any]) -> dict[str, Any]:
    """The text that token ids spell, control tokens included.

    Raises:
        InvalidField, UnsupportedField: see the field named.
        UnknownModel: not served here; also what else `find` raises.
    """
    parsed = validate(DetokenizeShape, {k: v for k, v in body.items() if v is not None})
    intake = find(parsed.model)
    if any(token_id >= intake.vocabulary.vocab_size for token_id in parsed.tokens):
        raise InvalidField("tokens", "tokens has a token id outside the vocabulary.")
    text = Detokenizer(intake.vocabulary, TextRules(shows_special=True))
    pieces = [text.feed(token_id) for token_id in parsed.tokens]
    return {"prompt": "".join(pieces) + text.finish()}
