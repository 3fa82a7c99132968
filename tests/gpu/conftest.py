"""What the tests of `tests/gpu` run on. They are the contract suites, and what only a GPU can show."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.machine import DEVICE, IS_REHEARSAL, flash_here
from tests.workers.models.conftest import tiny_model
from workers.hbm_pool import HbmPool
from workers.kernels.cuda import CudaOperators
from workers.kernels.cuda_graphs import Eager
from workers.kernels.device_pool import DevicePool

__all__ = ["tiny_model"]


@pytest.fixture(autouse=True, scope="session")
def _machine() -> None:
    if not IS_REHEARSAL and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def operators() -> CudaOperators:
    """The form under the suite of the operator port."""
    return CudaOperators(flash_here(), DEVICE, Eager(), max_blocks=64)


@pytest.fixture
def new_pool() -> object:
    """The pool under the suite of `HbmPool`."""

    def make(num_blocks: int) -> HbmPool:
        return DevicePool(num_blocks, 768, DEVICE, 1)

    return make
