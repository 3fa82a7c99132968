"""SentencePiece tokenizers in GGUF files: the ids are those that transformers gets from the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from pipeline.intake.hf_vocabulary import HfVocabulary
from workers.models.errors import ModelRefused
from workers.models.gguf_tokenizer import write_tokenizer

TEXT = """Once upon a time there was a small language model that knew few words. It read the same
story again and again, and whatever it read it told: once upon a time, once upon another time.
Größe, naïve, 12 345,67 and def f(x):\n\treturn x"""
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]


@pytest.fixture(scope="module")
def fields() -> dict[str, Any]:
    """The fields of a GGUF file: 4 special tokens, 256 bytes, and 300 pieces learned from a text."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(
        [TEXT] * 3, trainers.BpeTrainer(vocab_size=300, show_progress=False)
    )
    learned = sorted(learner.get_vocab(), key=learner.get_vocab().__getitem__)
    characters = [piece for piece in learned if len(piece) == 1]
    wholes = [piece for piece in learned if len(piece) > 1]
    tokens = [*SPECIAL, *(f"<0x{value:02X}>" for value in range(256)), *wholes, *characters]
    ranks = [-float(rank) for rank in range(len(wholes) + len(characters))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 260 + ranks,
        "tokenizer.ggml.token_type": [2, 3, 3, 4] + [6] * 256 + [1] * len(ranks),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ messages }}",
    }


@pytest.fixture(scope="module")
def ours(fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that we make."""
    directory = tmp_path_factory.mktemp("ours")
    write_tokenizer(fields, directory, "tiny.gguf", 512)
    config = {"vocab_size": 600, "max_position_embeddings": 512, "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def theirs(fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """What transformers makes of a file with these fields."""
    path = tmp_path_factory.mktemp("theirs") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(fields["tokenizer.ggml.tokens"])
    writer.add_token_scores(fields["tokenizer.ggml.scores"])
    writer.add_token_types(fields["tokenizer.ggml.token_type"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    architecture, description, _ = get_gguf_tokenizer(str(path))
    tokenizer: Tokenizer = convert_gguf_tokenizer(architecture, description)[0]
    return tokenizer


PARTS = st.sampled_from(
    [" ", "  ", "\n", "\t", "once", "upon", "time", "ß", "€", "日本", "<|user|>", "7"]
)


@given(text=st.one_of(st.lists(PARTS, max_size=12).map("".join), st.text(max_size=20)))
@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_text_has_the_ids_that_transformers_gives_it(
    text: str, ours: Path, theirs: Tokenizer
) -> None:
    tokenizer = Tokenizer.from_file(str(ours / "tokenizer.json"))

    ids = tokenizer.encode(text, add_special_tokens=False).ids

    assert ids == theirs.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == theirs.decode(ids)


def test_a_story_is_cut_into_its_words_and_comes_back_whole(ours: Path) -> None:
    tokenizer = Tokenizer.from_file(str(ours / "tokenizer.json"))

    encoded = tokenizer.encode("once upon a time €<|user|> time")

    assert encoded.tokens == [
        *("<s>", "▁once", "▁upon", "▁a", "▁time"),
        *("▁", "<0xE2>", "<0x82>", "<0xAC>", "<|user|>", "▁time"),
    ]
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT


def test_the_gateway_reads_its_bytes(ours: Path) -> None:
    vocabulary = HfVocabulary.load(ours)

    ids = vocabulary.encode("Größe €", special=False)

    first, *others = ids
    told = vocabulary.first_token_bytes(first) + b"".join(map(vocabulary.token_bytes, others))
    assert told.decode() == "Größe €"
    assert list(vocabulary.prompt_prefix) == [1]


def test_a_tokenizer_may_want_no_space_before_its_first_word(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    plain = fields | {
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }
    write_tokenizer(plain, tmp_path, "tiny.gguf", 512)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    encoded = tokenizer.encode("time time")

    assert encoded.tokens[-1] == "▁time"
    assert not encoded.tokens[0].startswith(("▁", "<s>"))
    assert tokenizer.decode(encoded.ids) == "time time"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokenizer.ggml.scores": []}, "has no scores"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "takes spaces away"),
    ],
)
def test_what_would_not_be_exact_is_refused(
    change: dict[str, Any], reason: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelRefused, match=reason):
        write_tokenizer(fields | change, tmp_path, "tiny.gguf", 512)
