"""Tokenizers in GGUF files: the ids are those that llama.cpp gets from the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from pipeline.intake.hf_vocabulary import HfVocabulary
from workers.models.errors import ModelRefused
from workers.models.gguf_tokenizer import write_tokenizer

TEXT = """Once upon a time there was a small language model that knew few words. It read the same
story again and again, and whatever it read it told: once upon a time, once upon another time.
Größe, naïve, 12 345,67 and def f(x):\n\treturn x"""
CODE = """class HTTPServer(Base):\n\tdef camelCase(self, x1=12345):  // It's we'll I'M THEY'RE
        return f"{x1}/{self.a}..."\n\n\n日本語のテキスト привет мир Straße a/b/c\r\n\r\n 1234567"""
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|endoftext|>"]


@pytest.fixture(scope="module")
def fields() -> dict[str, Any]:
    """The fields of a GGUF file: 5 special tokens, 256 bytes, and 300 pieces learned from a text."""
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
        "tokenizer.ggml.scores": [0.0] * 261 + ranks,
        "tokenizer.ggml.token_type": [2, 3, 3, 4, 3] + [6] * 256 + [1] * len(ranks),
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


def llama_cpp_of(
    path: Path, fields: dict[str, Any], architecture: str = "llama"
) -> llama_cpp.Llama:
    """What llama.cpp makes of a file with these fields and no weights."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(architecture.replace("phi", "phi-"))  # by which llama.cpp knows it
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_sliding_window(0)
    writer.add_rope_scaling_orig_ctx_len(512)
    writer.add_rope_dimension_count(16)
    for name, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return llama_cpp.Llama(str(path), vocab_only=True, verbose=False)


def assert_same_ids(text: str, ours: Tokenizer, theirs: llama_cpp.Llama) -> None:
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == theirs.tokenize(text.encode(), add_bos=False, special=True)


@pytest.fixture(scope="module", params=["llama", "phi3"])
def both(
    request: pytest.FixtureRequest,
    fields: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Tokenizer, llama_cpp.Llama]:
    """A SentencePiece tokenizer: ours and llama.cpp's. Phi-3's control tokens swallow white space."""
    directory = tmp_path_factory.mktemp("both")
    write_tokenizer(fields | {"general.architecture": request.param}, directory, "tiny.gguf", 512)
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return ours, llama_cpp_of(directory / "tiny.gguf", fields, request.param)


PARTS = st.sampled_from(
    [
        *(" ", "  ", "\n", "\t", "once", "upon", "time", "ß", "€", "日本", "7"),
        *("<|user|>", "<s>", "</s>", "<|endoftext|>"),
    ]
)


@given(text=st.one_of(st.lists(PARTS, max_size=12).map("".join), st.text(max_size=20)))
@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_text_has_the_ids_that_llama_cpp_gives_it(
    text: str, both: tuple[Tokenizer, llama_cpp.Llama]
) -> None:
    assert_same_ids(text, *both)


CUTS = ("qwen2", "llama-bpe", "smollm", "smaug-bpe", "dbrx", "gpt-4o")


@pytest.fixture(scope="module", params=CUTS)
def byte_level(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, llama_cpp.Llama]:
    """A byte-level tokenizer of 700 pieces with one way of cutting: ours and llama.cpp's."""
    learner = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r" ?\w+|\s+|[^\w\s]+"), behavior="isolated")
    apart = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    learner.pre_tokenizer = pre_tokenizers.Sequence([words, apart])
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|user|>", "</s>"],
    )
    learner.train_from_iterator([TEXT, CODE], trainer)
    model = json.loads(learner.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": request.param,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    directory = tmp_path_factory.mktemp("byte_level")
    write_tokenizer(fields, directory, "tiny.gguf", 512)
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return ours, llama_cpp_of(directory / "tiny.gguf", fields)


# Without accents on capitals and marks of their own: there llama.cpp departs from what the models
# were trained with (Qwen composes them, GPT-4o's words hold them), and we do not.
CODE_PARTS = st.sampled_from(
    [
        *(" ", "  ", "\n", "\n\n", "\t", "\r\n", "'s", "'LL", "'", "/", "//", "...", "_", "½"),
        *("once", "Time", "HTTPServer", "camelCase", "x1", "12345", "7", "<|user|>"),
        *("ß", "é", "€", "日本", "привет"),
    ]
)


@given(text=st.lists(CODE_PARTS, max_size=14).map("".join))
@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_each_way_of_cutting_is_that_of_llama_cpp(
    text: str, byte_level: tuple[Tokenizer, llama_cpp.Llama]
) -> None:
    assert_same_ids(text, *byte_level)


def test_a_story_is_cut_into_its_words_and_comes_back_whole(ours: Path) -> None:
    tokenizer = Tokenizer.from_file(str(ours / "tokenizer.json"))

    encoded = tokenizer.encode("once upon a time €<|user|> time")

    assert encoded.tokens == [
        *("<s>", "▁once", "▁upon", "▁a", "▁time"),
        *("▁", "<0xE2>", "<0x82>", "<0xAC>", "<|user|>", "▁", "▁time"),
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
