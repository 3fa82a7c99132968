"""Which model is served, and when it is converted first."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.errors import ModelUnusable
from pipeline.cli.model_store import (
    ModelPlan,
    convert,
    packaged_gguf,
    plan_model,
    plan_models,
)
from pipeline.cli.serve_options import EngineName


def test_the_packaged_model_is_found_without_importing_its_package() -> None:
    path = packaged_gguf()
    assert path is not None
    assert path.stat().st_size > 50e6


def test_without_a_model_the_packaged_one_is_converted(tmp_path: Path) -> None:
    plan = plan_model(None, EngineName.TORCH, tmp_path)
    assert plan == ModelPlan("smollm2-135m-instruct", tmp_path / "smollm2-135m-instruct", "")


def test_a_model_directory_is_served_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    plan = plan_model(str(tmp_path / "my-model"), EngineName.TORCH, tmp_path / "models")
    assert plan == ModelPlan("my-model", tmp_path / "my-model")


def test_a_gguf_file_that_changed_is_converted_anew(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"1")
    first = plan_model(str(file), EngineName.TORCH, tmp_path)
    file.write_bytes(b"22")
    second = plan_model(str(file), EngineName.TORCH, tmp_path)
    assert (first.name, first.convert_from) == ("m", str(file))
    assert first.path != second.path


@pytest.mark.parametrize("name", ["nowhere", "meta-llama/Llama-3", "folder", "text.txt"])
def test_what_is_no_model_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").write_text("hello")
    with pytest.raises(ModelUnusable, match=name):
        plan_model(str(tmp_path / name), EngineName.TORCH, tmp_path)


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json", tmp_path / "x" / "a.json"]
    files[2].parent.mkdir()
    for file in files:
        file.write_text("{}")
    names = [str(file) for file in files]
    plans = plan_models(names[:2], EngineName.SCRIPT, tmp_path)
    assert [plan.name for plan in plans] == ["a", "b"]
    with pytest.raises(ModelUnusable, match="two models"):
        plan_models(names, EngineName.SCRIPT, tmp_path)


def test_test_engines_need_no_model(tmp_path: Path) -> None:
    for engine in (EngineName.DIGEST, EngineName.SCRIPT):
        assert plan_model(None, engine, tmp_path) == ModelPlan(str(engine), None)


def test_a_conversion_that_fails_leaves_no_model_and_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    plan = plan_model(str(broken), EngineName.TORCH, tmp_path / "models")
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelUnusable, match="conversion failed"):
        convert(plan, lambda _text, _percent: None)
    assert plan.path is not None
    assert not plan.path.exists()
