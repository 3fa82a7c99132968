"""A Hugging Face tokenizer.json as a vocabulary, by the `tokenizers` library alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Self

import structlog
from tokenizers import Tokenizer

from pipeline.intake.context_length import CONTEXT_FIELDS, exact_context, told_context
from pipeline.intake.errors import ModelFilesUnusable

log = structlog.get_logger(__name__)

WORD_SPACE = "\u2581"
# What a control token swallows beside it: Unicode's White_Space, not Python's.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
_BYTE_TOKEN_CHARS = len("<0x00>")


class TokenSpelling(Enum):
    """How tokens spell bytes, as the decoder of tokenizer.json says.

    BYTE_LEVEL: GPT-2's table, one printable character per byte. LLAMA: `\u2581` is a space, `<0xAB>`
    a byte, one leading space of an answer is dropped. METASPACE: `\u2581` is a space, those of the
    first token are dropped. METASPACE_KEEPING: none is dropped.
    """

    BYTE_LEVEL = auto()
    LLAMA = auto()
    METASPACE = auto()
    METASPACE_KEEPING = auto()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What tokenizer.json does not say and the other files of a model directory do."""

    vocab_size: int
    max_context: int
    bos_token_id: int | None
    eos_token_ids: frozenset[int]

    @classmethod
    def read(cls, directory: Path, tokenizer: Tokenizer) -> Self:
        """From config.json, generation_config.json and tokenizer_config.json.

        Raises:
            ModelFilesUnusable: config.json is missing or states no context length.
        """
        config = read_json(directory / "config.json")
        generation = read_json(directory / "generation_config.json")
        named = read_json(directory / "tokenizer_config.json")
        max_context, told = exact_context(config), told_context(config)
        if max_context is None:
            raise ModelFilesUnusable(directory, f"config.json has none of {CONTEXT_FIELDS}")
        if max_context != told:
            log.warning("original_context_only", path=str(directory), told=told, tokens=max_context)
        eos = [generation.get("eos_token_id"), config.get("eos_token_id")]
        ids = next((_id_set(value) for value in eos if value is not None), frozenset())
        named_eos = _named_id(named.get("eos_token"), tokenizer)
        bos = config.get("bos_token_id")
        return cls(
            vocab_size=int(config.get("vocab_size") or tokenizer.get_vocab_size()),
            max_context=max_context,
            bos_token_id=bos
            if isinstance(bos, int)
            else _named_id(named.get("bos_token"), tokenizer),
            eos_token_ids=ids | (frozenset() if named_eos is None else {named_eos}),
        )


class HfVocabulary:
    """See `Vocabulary`.

    Several tokenizers are held because whether control tokens are seen is a switch of the tokenizer
    and not of the call, and so is whether a text begins. Token bytes are computed on first use.
    """

    def __init__(self, tokenizer_json: str, facts: ModelFacts, *, path: Path = Path()) -> None:
        described = json.loads(tokenizer_json)
        self._seeing = _tokenizer(tokenizer_json, sees_special=True)
        self._plain = _tokenizer(tokenizer_json, sees_special=False)
        self._going_on = self._plain
        behind = _pre_tokenizer_behind_controls(described)
        if behind != described.get("pre_tokenizer"):
            going_on = json.dumps(described | {"pre_tokenizer": behind})
            self._going_on = _tokenizer(going_on, sees_special=False)
        self._spelling = find_spelling(described.get("decoder"), path)
        added = self._seeing.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._strips_left = {token_id for token_id, token in added.items() if token.lstrip}
        self._strips_right = {token_id for token_id, token in added.items() if token.rstrip}
        self._bytes: dict[int, bytes] = {}
        self.special_texts: Sequence[tuple[str, int]] = sorted(
            ((added[token_id].content, token_id) for token_id in self._special),
            key=lambda pair: -len(pair[0]),
        )
        self.prompt_prefix: Sequence[int] = tuple(self._seeing.encode("").ids)
        self.vocab_size = facts.vocab_size
        self.max_context = facts.max_context
        self.bos_token_id = facts.bos_token_id
        self.eos_token_ids = facts.eos_token_ids

    @classmethod
    def load(cls, directory: Path) -> Self:
        """From a model directory.

        Raises:
            ModelFilesUnusable: no tokenizer.json, or one that we cannot spell with.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelFilesUnusable(directory, "there is no tokenizer.json")
        text = path.read_text(encoding="utf-8")
        facts = ModelFacts.read(directory, Tokenizer.from_str(text))
        return cls(text, facts, path=path)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """See `Vocabulary`."""
        return _encode(self._seeing if special else self._plain, text)

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """See `Vocabulary`."""
        ids: list[int] = []
        for rank, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
                continue
            text = part
            if rank > 0 and parts[rank - 1] in self._strips_right:
                text = text.lstrip(_WHITE_SPACE)
            if rank + 1 < len(parts) and parts[rank + 1] in self._strips_left:
                text = text.rstrip(_WHITE_SPACE)
            if text:
                ids += _encode(self._going_on if rank else self._plain, text)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """See `Vocabulary`."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def first_token_bytes(self, token_id: int) -> bytes:
        """See `Vocabulary`."""
        data = self.token_bytes(token_id)
        if self._spelling is TokenSpelling.LLAMA:
            return data.removeprefix(b" ")
        if self._spelling is TokenSpelling.METASPACE:
            text: str = self._seeing.id_to_token(token_id) or ""
            return text.replace(WORD_SPACE, "").encode()
        return data

    def is_special(self, token_id: int) -> bool:
        """See `Vocabulary`."""
        return token_id in self._special

    def _spell(self, token_id: int) -> bytes:
        token: str | None = self._seeing.id_to_token(token_id)
        if token is None:
            return b""
        if self._spelling is TokenSpelling.BYTE_LEVEL:
            values = [_BYTE_OF_CHAR.get(char) for char in token]
            spelled = bytes(value for value in values if value is not None)
            return spelled if len(spelled) == len(token) else token.encode()
        is_byte = len(token) == _BYTE_TOKEN_CHARS and token.startswith("<0x")
        if self._spelling is TokenSpelling.LLAMA and is_byte:
            return bytes.fromhex(token[3:5])
        return token.replace(WORD_SPACE, " ").encode()


def _tokenizer(tokenizer_json: str, *, sees_special: bool) -> Tokenizer:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = not sees_special
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    # A batch of one: `encode` would keep all other threads waiting, seconds for a huge text.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


def _pre_tokenizer_behind_controls(described: dict[str, Any]) -> Any:
    """That section of a tokenizer.json for a text that stands behind a control token.

    Where SentencePiece puts a space before the first word of all, this one's first word has none.
    """
    pre_tokenizer = copy.deepcopy(described.get("pre_tokenizer"))
    for step in _steps(pre_tokenizer, "pretokenizers"):
        if step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
    return pre_tokenizer


def find_spelling(decoder: dict[str, Any] | None, path: Path) -> TokenSpelling:
    """What the `decoder` section of tokenizer.json means.

    Raises:
        ModelFilesUnusable: a decoder that is neither byte-level nor SentencePiece-like.
    """
    steps = list(_steps(decoder, "decoders"))
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return TokenSpelling.BYTE_LEVEL
    if "ByteFallback" in kinds or "Replace" in kinds:
        return TokenSpelling.LLAMA if "Strip" in kinds else TokenSpelling.METASPACE_KEEPING
    for step in steps:
        if step.get("type") == "Metaspace":
            keeps = step.get("prepend_scheme") == "never" or step.get("add_prefix_space") is False
            return TokenSpelling.METASPACE_KEEPING if keeps else TokenSpelling.METASPACE
    raise ModelFilesUnusable(path, f"decoder {sorted(map(str, kinds))} is not known")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} when there is no such file.

    Raises:
        ModelFilesUnusable: the file holds something else.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFilesUnusable(path, "is not JSON") from error
    if not isinstance(value, dict):
        raise ModelFilesUnusable(path, "is not a JSON object")
    return value


def token_content(value: object) -> str | None:
    """A token of tokenizer_config.json, which is a string or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _steps(section: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """A section of tokenizer.json, or those that it is a sequence of."""
    if section is not None and section.get("type") == "Sequence":
        yield from section.get(name, ())
    else:
        yield section or {}


def _id_set(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(item for item in values if isinstance(item, int))


def _named_id(value: object, tokenizer: Tokenizer) -> int | None:
    content = token_content(value)
    if content is None:
        return None
    token_id: int | None = tokenizer.token_to_id(content)
    return token_id


def _byte_of_char() -> dict[str, int]:
    """GPT-2's reversible table (Radford et al. 2019): printable bytes stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(value): value for value in printable}
    others = (value for value in range(256) if value not in set(printable))
    table.update((chr(256 + rank), value) for rank, value in enumerate(others))
    return table


_BYTE_OF_CHAR = _byte_of_char()
