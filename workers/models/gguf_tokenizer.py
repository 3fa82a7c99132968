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

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF that stand for themselves in a text

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a text is cut before merging, by the name that llama.cpp gave the way (`tokenizer.ggml.pre`).
_PATTERNS = {"qwen2": _WORDS % "1", "llama-bpe": _WORDS % "1,3", "llama3": _WORDS % "1,3"}
_DIGITS_APART = ("smollm",)


def write_tokenizer(fields: Fields, directory: Path, model: str, context_tokens: int) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into `directory`.

    `fields` are the GGUF's, decoded.

    Raises:
        ModelRefused: the tokenizer is of a kind that would not be rebuilt exactly.
    """
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    _byte_level_bpe(fields, tokens, model).save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
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
    types: list[int] = fields["tokenizer.ggml.token_type"]
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, special=token_type == _CONTROL, normalized=False)
            tokenizer.add_tokens([added])
    if fields.get("tokenizer.ggml.add_bos_token", False):
        bos_id = fields["tokenizer.ggml.bos_token_id"]
        bos = tokens[bos_id]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer
