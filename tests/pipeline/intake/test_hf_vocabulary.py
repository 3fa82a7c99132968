"""Cases C006 and C007 on tokenizers that are made here."""

from __future__ import annotations

import json
import random
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.intake.detokenizer import Detokenizer
from pipeline.intake.errors import ModelFilesUnusable
from pipeline.intake.hf_vocabulary import HfVocabulary, ModelFacts
from pipeline.intake.vocabulary import load_vocabulary

CORPUS = ["Once upon a time there was a café.", "  two spaces and an emoji 👩‍👩‍👧", " leading"]
SPECIAL = ["<|start|>", "<|end|>"]
FACTS = ModelFacts(vocab_size=600, max_context=128, bos_token_id=None, eos_token_ids=frozenset({1}))


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def llama_like() -> Tokenizer:
    pieces = ["▁Once", "▁upon", "▁", "▁a", "▁time", "é", "."]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {piece: 256 + rank for rank, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def metaspace() -> Tokenizer:
    pieces = [("▁Once", -1.0), ("▁upon", -1.0), ("▁", -2.0), ("▁a", -1.0), ("▁time", -1.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, None, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def vocabulary_of(tokenizer: Tokenizer) -> HfVocabulary:
    return HfVocabulary(tokenizer.to_str(), FACTS)


def streamed(vocabulary: HfVocabulary, ids: list[int]) -> str:
    detokenizer = Detokenizer(vocabulary)
    return "".join(detokenizer.feed(token_id) for token_id in ids) + detokenizer.finish()


@pytest.mark.parametrize("make", [llama_like, metaspace])
def test_both_spaces_of_a_sentence_piece_text_survive(make: Any) -> None:
    tokenizer = make()
    ids = [tokenizer.token_to_id(piece) for piece in ("▁Once", "▁upon", "▁", "▁a", "▁time")]
    assert streamed(vocabulary_of(tokenizer), ids) == "Once upon  a time"


@pytest.mark.parametrize("make", [llama_like, metaspace, byte_level])
def test_streamed_text_equals_the_decoding_of_all_ids(make: Any) -> None:
    tokenizer = make()
    vocabulary = vocabulary_of(tokenizer)
    ids = [
        token_id
        for token_id in range(tokenizer.get_vocab_size())
        if make is byte_level or not (tokenizer.id_to_token(token_id) or "").startswith("<0x")
    ]
    source = random.Random(1)  # noqa: S311 - a test
    for _ in range(200):
        chosen = source.choices(ids, k=source.randint(1, 30))
        assert streamed(vocabulary, chosen) == tokenizer.decode(chosen)


def test_byte_tokens_of_a_sentence_piece_vocabulary_join_to_characters() -> None:
    tokenizer = llama_like()
    ids = [257 - 1, *"é👩".encode()]
    assert streamed(vocabulary_of(tokenizer), ids) == tokenizer.decode(ids) == "Onceé👩"


def test_a_byte_level_answer_may_begin_with_a_space() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(" leading").ids
    assert streamed(vocabulary_of(tokenizer), ids) == " leading"


def test_control_tokens_are_seen_only_where_asked() -> None:
    tokenizer = byte_level()
    vocabulary = vocabulary_of(tokenizer)
    text = "hi<|end|>\n<|start|>"
    special = {tokenizer.token_to_id(token) for token in SPECIAL}
    assert special <= set(vocabulary.encode(text, special=True))
    plain = vocabulary.encode(text, special=False)
    assert not special & set(plain)
    assert streamed(vocabulary, plain) == text
    assert [text for text, _ in vocabulary.special_texts] == SPECIAL


def test_an_id_that_stands_for_nothing_has_no_bytes() -> None:
    assert vocabulary_of(byte_level()).token_bytes(599) == b""


def test_an_unknown_decoder_is_refused() -> None:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))  # noqa: S106 - a token of text
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelFilesUnusable, match="WordPiece"):
        vocabulary_of(tokenizer)


def test_a_model_directory_states_context_and_ends(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"max_position_embeddings": 99, "vocab_size": 512, "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    vocabulary = load_vocabulary("torch", tmp_path)
    assert (vocabulary.max_context, vocabulary.vocab_size) == (99, 512)
    assert vocabulary.eos_token_ids == {0, tokenizer.token_to_id("<|end|>")}


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesUnusable, match=r"tokenizer\.json"):
        load_vocabulary("torch", tmp_path)


def test_c090_other_threads_run_while_a_huge_text_is_encoded() -> None:
    vocabulary = HfVocabulary(byte_level().to_str(), FACTS)
    text = "Once upon a time there was a café. " * 90_000
    ticks_s: list[float] = []
    is_over = threading.Event()

    def tick() -> None:
        while not is_over.wait(0.002):
            ticks_s.append(time.monotonic())

    ticking = threading.Thread(target=tick)
    ticking.start()
    began_s = time.monotonic()
    num_ids = len(vocabulary.encode(text, special=False))
    ended_s = time.monotonic()
    is_over.set()
    ticking.join()

    assert num_ids > 90_000
    longest_s = max(b - a for a, b in pairwise([began_s, *ticks_s, ended_s]))
    assert longest_s < (ended_s - began_s) / 2
