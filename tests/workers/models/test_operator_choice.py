"""Without native kernels a model runs on the reference, and one line says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.workers.models.tiny_models import logits_of
from workers.kernels import native_build, native_machine
from workers.models.bench import EngineBench
from workers.models.errors import ModelRefused
from workers.models.load import load_runner
from workers.models.operator_choice import why_not_here

PROMPT = [5, 77, 130, 9, 250, 31, 8] * 5
MakeModel = Callable[[str], Path]
X86 = {"fma", "avx2"}
ARM: set[str] = set()  # its /proc/cpuinfo has no line of flags


def forget() -> None:
    native_build.native_library.cache_clear()
    native_machine._run_function.cache_clear()  # a process of its own would do
    why_not_here.cache_clear()


@pytest.fixture(params=["no compiler", "an x86 without AVX-512", "an ARM"])
def reason(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A machine that cannot run the native kernels, and what must be said of it."""
    forget()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if request.param == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(native_build, "_cpu_flags", lambda: native_build._NEEDED_CPU_FLAGS)
    else:
        flags = ARM if request.param == "an ARM" else X86
        monkeypatch.setattr(native_build, "_cpu_flags", lambda: flags)
    yield "there is no C++ compiler" if request.param == "no compiler" else "this CPU lacks avx512"
    forget()


def test_auto_is_float32_on_the_reference_and_exact(reason: str, tiny_model: MakeModel) -> None:
    directory = tiny_model("llama")

    with capture_logs() as lines:
        runner = load_runner("torch", directory, dtype="auto")
    bench = EngineBench(runner)
    logits = bench.step([bench.lane(PROMPT)], [len(PROMPT)])[0]

    said = [line for line in lines if line["event"] == "native_kernels_not_used"]
    assert len(said) == 1
    assert said[0]["reason"].startswith(reason)
    assert "\n" not in said[0]["reason"]
    assert runner.spec.layout.dtype == "float32"
    np.testing.assert_allclose(logits, logits_of(directory, PROMPT)[-1], atol=2e-4, rtol=0)


def test_bfloat16_runs_on_the_reference_and_int8_is_refused(
    reason: str, tiny_model: MakeModel
) -> None:
    assert load_runner("torch", tiny_model("llama"), dtype="bfloat16").spec.layout.dtype == (
        "bfloat16"
    )
    with pytest.raises(ModelRefused, match="int8 needs the native kernels") as refusal:
        load_runner("torch", tiny_model("llama"), dtype="int8")
    assert reason in refusal.value.reason
