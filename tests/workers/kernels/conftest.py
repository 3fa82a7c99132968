"""The forms under test."""

from __future__ import annotations

import pytest
import torch

from tests.workers.kernels.flash_stand_in import FLASH_2, FLASH_3, StandIn
from workers.kernels.cuda import CudaOperators
from workers.kernels.cuda_graphs import Eager
from workers.kernels.flash import Flash2, Flash3
from workers.kernels.native import NativeOperators
from workers.kernels.native_build import NativeKernelsMissing
from workers.kernels.operators import Operators
from workers.kernels.reference import ReferenceOperators


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def native() -> NativeOperators:
    """The native form, where this machine can run it."""
    try:
        return NativeOperators()
    except NativeKernelsMissing as error:
        pytest.skip(str(error))


FORMS = ("reference-float32", "reference-bfloat16", "native", "cuda-flash2", "cuda-flash3")
MAX_BLOCKS = 64


@pytest.fixture(scope="session", params=FORMS)
def operators(request: pytest.FixtureRequest) -> Operators:
    """Every form; the CUDA one on the CPU, over a stand-in for flash-attn."""
    if request.param == "native":
        form: NativeOperators = request.getfixturevalue("native")
        return form
    if request.param.startswith("cuda"):
        flash = (
            Flash2(StandIn(FLASH_2).module)
            if request.param.endswith("2")
            else Flash3(StandIn(FLASH_3).module)
        )
        return CudaOperators(flash, torch.device("cpu"), Eager(), MAX_BLOCKS)
    dtype = torch.float32 if request.param.endswith("32") else torch.bfloat16
    return ReferenceOperators(dtype)
