"""Where the files of a model are looked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipeline.intake.errors import ModelFilesUnusable
from pipeline.intake.intake_loader import IntakeLoader
from pipeline.intake.known_models import KnownModel
from pipeline.settings import PipelineSettings


def loader(models_dir: Path, **settings: object) -> IntakeLoader:
    return IntakeLoader(PipelineSettings.model_validate({"engine": "torch"} | settings), models_dir)


def make_model(directory: Path, max_context: int) -> str:
    """A directory with what the text side of a model needs; its path."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({char: n for n, char in enumerate(sorted(alphabet))}, []))
    tokenizer.decoder = decoders.ByteLevel()
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"max_position_embeddings": max_context, "vocab_size": 256}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def test_the_settings_name_a_main_model_and_others(tmp_path: Path) -> None:
    settings = {"engine": "script", "model": "/main.json", "model_aliases": "x, y"}
    found = loader(tmp_path, **settings).configured({"b": "/b.json", "c": "", "main": "/other"})
    assert found == [
        KnownModel("main", "script", ("/main.json",), ("x", "y")),
        KnownModel("b", "script", ("/b.json",)),
        KnownModel("c", "script"),
    ]
    assert loader(tmp_path).configured({}) == [], "a gateway may do without a model of its own"


def test_a_model_is_found_where_its_worker_says_or_under_its_name(tmp_path: Path) -> None:
    shelf = loader(tmp_path / "models")
    far, told = str(tmp_path / "on another machine"), make_model(tmp_path / "told", 100)
    make_model(tmp_path / "models" / "org" / "m", 200)

    assert shelf.load(KnownModel("m", "torch", (far, told))).vocabulary.max_context == 100
    assert shelf.load(KnownModel("org/m", "torch", (far,))).vocabulary.max_context == 200
    assert shelf.load(KnownModel("org/m", "torch", (told,))).vocabulary.max_context == 100


def test_a_name_leads_to_no_directory_beside_those_of_models(tmp_path: Path) -> None:
    make_model(tmp_path / "secret", 100)
    with pytest.raises(ModelFilesUnusable):
        loader(tmp_path / "models").load(KnownModel("../secret", "torch"))


@pytest.mark.parametrize("engine", ["torch", "script", "oracle"])
def test_what_is_not_on_this_machine_or_not_known_is_refused_with_the_reason(
    tmp_path: Path, engine: str
) -> None:
    with pytest.raises(ModelFilesUnusable) as refused:
        loader(tmp_path).load(KnownModel("m", engine, (str(tmp_path / "gone"),)))
    assert ("oracle" if engine == "oracle" else "gone") in str(refused.value)


def test_the_given_chat_template_is_that_of_the_main_model_only(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("given")
    shelf = loader(tmp_path, engine="digest", model_name="main", chat_template=template)

    sources = [shelf.load(KnownModel(name, "digest"))._prompts._template.source for name in "ab"]
    assert "given" not in sources
    main = shelf.load(KnownModel("main", "digest"))
    assert main._prompts._template.source == "given"
