"""The budget of `pointsman serve`: what it is checked against, and what a model is thought to take."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.errors import OptionInvalid
from pipeline.cli.model_store import ModelPlan
from pipeline.cli.resident_models import WORKER_BYTES, make_keeper
from pipeline.cli.serve_options import EngineName, ServeOptions

MIB = 1 << 20


def options(model_bytes: int | None, *keep_warm: str) -> ServeOptions:
    return ServeOptions(
        host="127.0.0.1",
        port=8000,
        models=("a", "b"),
        engine=EngineName.TORCH,
        workers={"prefill": 1, "decode": 1},
        redis_url=None,
        flower_port=None,
        keys_file=None,
        kv_dram_bytes=MIB,
        kv_nvme_bytes=0,
        drain_s=30.0,
        model_bytes=model_bytes,
        keep_warm=keep_warm,
    )


@pytest.fixture
def plans(tmp_path: Path) -> list[ModelPlan]:
    """Model a has 4 MiB of weights, b none that could be found."""
    for name in "ab":
        (tmp_path / name).mkdir()
    for number in range(2):
        (tmp_path / "a" / f"{number}.safetensors").write_bytes(bytes(2 * MIB))
    (tmp_path / "a" / "tokenizer.json").write_bytes(bytes(MIB))
    return [ModelPlan(name, tmp_path / name) for name in "ab"]


def test_each_worker_of_a_model_is_thought_to_take_its_weights(plans: list[ModelPlan]) -> None:
    keeper = make_keeper(options(2**40, "b"), plans)
    assert keeper is not None
    assert [(m.name, m.num_bytes, m.is_warm) for m in keeper.models] == [
        ("a", 2 * (WORKER_BYTES + 4 * MIB), False),
        ("b", 2 * WORKER_BYTES, True),
    ]


def test_without_a_budget_nobody_decides(plans: list[ModelPlan]) -> None:
    assert make_keeper(options(None), plans) is None


def test_a_budget_that_a_model_cannot_fit_is_refused(plans: list[ModelPlan]) -> None:
    with pytest.raises(OptionInvalid, match="--model-memory 100MiB: expected at least 264MiB"):
        make_keeper(options(100 * MIB), plans)
    with pytest.raises(OptionInvalid, match="at least 520MiB"):
        make_keeper(options(300 * MIB, "b"), plans)


@pytest.mark.parametrize(("model_bytes", "name"), [(2**40, "c"), (None, "a")])
def test_a_model_that_cannot_be_kept_warm_is_named(
    plans: list[ModelPlan], model_bytes: int | None, name: str
) -> None:
    with pytest.raises(OptionInvalid, match=f"--keep-warm {name}"):
        make_keeper(options(model_bytes, name), plans)
