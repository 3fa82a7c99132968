"""The budget of `pointsman serve`: what it is checked against, and what a model is thought to take."""

from __future__ import annotations

import io
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.cli.child import Part, log_says
from pipeline.cli.data_directory import DataDirectory
from pipeline.cli.errors import OptionInvalid
from pipeline.cli.model_keeper import KeptModel, ModelKeeper
from pipeline.cli.model_store import ModelPlan
from pipeline.cli.resident_models import WORKER_BYTES, ResidentModels, make_keeper
from pipeline.cli.screen import Screen
from pipeline.cli.serve_options import EngineName, ServeOptions
from pipeline.cli.signal_inbox import SignalInbox
from pipeline.cli.supervisor import Supervisor
from pipeline.ledger.admission import AdmissionLimits
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.store import connect_async
from pipeline.protocol.request import Request
from pipeline.protocol.sampling import SamplingParams

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


def test_of_several_kinds_of_weights_those_that_are_loaded_count(plans: list[ModelPlan]) -> None:
    (plans[0].path or Path()).joinpath("pytorch_model.bin").write_bytes(bytes(MIB))
    (plans[1].path or Path()).joinpath("old.bin").mkdir()
    keeper = make_keeper(options(2**40), plans)
    assert keeper is not None
    assert [model.num_bytes // 2 - WORKER_BYTES for model in keeper.models] == [4 * MIB, 0]


@pytest.mark.parametrize("is_drained", [False, True])
async def test_on_a_drained_node_no_model_is_started_whatever_is_asked_for(
    tmp_path: Path, redis_url: str, *, is_drained: bool
) -> None:
    connection = connect_async(redis_url)
    gateway = ClientLedger(connection, limits=AdmissionLimits(9), retention_s=60)
    request = Request("r1", "b", [1], SamplingParams(max_tokens=1), tenant="t")
    await gateway.submit(request, "prefill.b", "gateway:g")
    await connection.aclose()
    sizes = {"a": 2**30, "b": 2**30}
    keeper = ModelKeeper(2**30, [KeptModel(name, size) for name, size in sizes.items()])
    keeper.models[0].is_wanted = True
    directory = DataDirectory(tmp_path)
    directory.create()
    command = ("bash", "-c", "echo up; while :; do sleep 0.05; done")
    part_a = Part(
        "a", command, dict(os.environ), log_says("up"), 0, stays_down=lambda _: is_drained
    )
    with SignalInbox() as inbox:
        screen = Screen(Console(file=io.StringIO(), force_terminal=False))
        supervisor = Supervisor(directory, screen, inbox, None)
        residents = ResidentModels(supervisor, keeper, {name: [name] for name in sizes}, redis_url)
        looks = iter(range(8))

        def on_look(now_s: float) -> None:
            residents.tick(now_s)
            if next(looks, None) is None or directory.log_path("b").exists():
                os.kill(os.getpid(), signal.SIGINT)

        try:
            supervisor.start([part_a], 10.0)
            supervisor.add([replace(part_a, name="b")])
            supervisor.watch(on_look)
            assert directory.log_path("b").exists() != is_drained
            assert supervisor.are_ready(["a"]) == is_drained, "it ends as it was told to"
        finally:
            supervisor.stop()
            residents.close()


@pytest.mark.parametrize(("model_bytes", "name"), [(2**40, "c"), (None, "a")])
def test_a_model_that_cannot_be_kept_warm_is_named(
    plans: list[ModelPlan], model_bytes: int | None, name: str
) -> None:
    with pytest.raises(OptionInvalid, match=f"--keep-warm {name}"):
        make_keeper(options(model_bytes, name), plans)
