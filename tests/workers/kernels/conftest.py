"""The forms under test."""

from __future__ import annotations

import pytest
import torch

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


@pytest.fixture(scope="session", params=["reference-float32", "reference-bfloat16", "native"])
def operators(request: pytest.FixtureRequest) -> Operators:
    """Every form."""
    if request.param == "native":
        form: NativeOperators = request.getfixturevalue("native")
        return form
    dtype = torch.float32 if request.param.endswith("32") else torch.bfloat16
    return ReferenceOperators(dtype)
