"""The tokenizer inside a GGUF file, as the files of a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from workers.models.errors import ModelRefused

Fields = Mapping[str, Any]

# Token types of GGUF. Unknown, control and user-defined ones stand for themselves in a text.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_WORD_SPACE = "\u2581"  # how SentencePiece writes a space

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a text is cut before merging, by the name that llama.cpp gave the way (`tokenizer.ggml.pre`).
_SHORT_NUMBERS = _WORDS % "1,3"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED_WORDS = (  # words end where capitals begin
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SUFFIX}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {
    "qwen2": _WORDS % "1",
    "llama-bpe": _SHORT_NUMBERS,
    "llama3": _SHORT_NUMBERS,
    "smaug-bpe": _SHORT_NUMBERS,
    "dbrx": _SHORT_NUMBERS,
    "gpt-4o": _CASED_WORDS,
}
_DIGITS_APART = ("smollm",)
_KEEPING = {"<unk>", "<s>", "<|endoftext|>"}  # of the control tokens of Phi-3


def write_tokenizer(fields: Fields, directory: Path, model: str, context_tokens: int) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into `directory`.

    `fields` are the GGUF's, decoded.

    Raises:
        ModelRefused: the tokenizer is of a kind that would not be rebuilt exactly.
    """
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    is_sentencepiece = fields.get("tokenizer.ggml.model") == "llama"
    adds_bos = bool(fields.get("tokenizer.ggml.add_bos_token", is_sentencepiece))
    build = _sentencepiece_bpe if is_sentencepiece else _byte_level_bpe
    tokenizer = build(fields, tokens, model)
    _add_special_tokens(tokenizer, fields, tokens, strips=_swallowing(fields, tokens))
    bos_id = fields.get("tokenizer.ggml.bos_token_id")
    if adds_bos and bos_id is not None:
        bos = tokens[bos_id]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    # Not `save`: where there is no room that raises a bare Exception.
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos,
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for name, gguf_name in names.items():
        token_id = fields.get(f"tokenizer.ggml.{gguf_name}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _byte_level_bpe(fields: Fields, tokens: list[str], model: str) -> Tokenizer:
    kind, cut = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or (cut not in _PATTERNS and cut not in _DIGITS_APART):
        raise ModelRefused(
            model, f"its tokenizer {kind}/{cut} is not known; use its Hugging Face directory"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    ignores_merges = cut in ("llama-bpe", "llama3")
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=ignores_merges))
    if cut in _DIGITS_APART:
        first: pre_tokenizers.PreTokenizer = pre_tokenizers.Digits(individual_digits=True)
    else:
        first = pre_tokenizers.Split(Regex(_PATTERNS[cut]), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut in _DIGITS_APART)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])
    if cut == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(fields: Fields, tokens: list[str], model: str) -> Tokenizer:
    """SentencePiece's BPE: words begin with a space of their own, rare characters become bytes."""
    for name in ("scores", "token_type"):
        if len(fields.get(f"tokenizer.ggml.{name}") or ()) != len(tokens):
            raise ModelRefused(model, f"its tokenizer has no {name}")
    if fields.get("tokenizer.ggml.remove_extra_whitespaces", False):
        raise ModelRefused(model, "its tokenizer takes spaces away")
    unknown_id = fields.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        BPE(
            {token: token_id for token_id, token in enumerate(tokens)},
            _merges(fields, tokens),
            unk_token=None if unknown_id is None else tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    # Also where a space stands already, and behind control tokens, as llama.cpp does.
    prefix = [normalizers.Prepend(_WORD_SPACE)] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _WORD_SPACE)])
    steps = [decoders.Replace(_WORD_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(fields: Fields, tokens: list[str]) -> list[tuple[str, str]]:
    """Pairs in the order in which SentencePiece joins them: by the score of the whole.

    Of one whole's pairs that with the longer left part comes first, which matters only where two of
    them overlap.
    """
    scores, types = fields["tokenizer.ggml.scores"], fields["tokenizer.ggml.token_type"]
    is_part = {
        token for token, kind in zip(tokens, types, strict=True) if kind in (_NORMAL, _USER_DEFINED)
    }
    pairs = [
        (score, cut, token)
        for token, score in zip(tokens, scores, strict=True)
        if token in is_part
        for cut in range(1, len(token))
        if token[:cut] in is_part and token[cut:] in is_part
    ]
    pairs.sort(key=lambda pair: (-pair[0], -pair[1], pair[1] - len(pair[2])))
    return [(token[:cut], token[cut:]) for _, cut, token in pairs]


def _swallowing(fields: Fields, tokens: list[str]) -> set[str]:
    """Control tokens that take the white space behind them away; a GGUF file has no field for it."""
    is_first_phi3 = fields.get("general.architecture") == "phi3" and (
        fields.get("tokenizer.ggml.model") == "llama"
    )
    return set(tokens) - _KEEPING if is_first_phi3 else set()


def _add_special_tokens(
    tokenizer: Tokenizer, fields: Fields, tokens: list[str], strips: set[str]
) -> None:
    types: list[int] = fields["tokenizer.ggml.token_type"]
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            added = AddedToken(
                token, special=kind != _USER_DEFINED, normalized=False, rstrip=token in strips
            )
            tokenizer.add_tokens([added])
