"""The device under test: a GPU, or the CPU in a rehearsal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.workers.kernels.flash_stand_in import FLASH_2, StandIn
from workers.kernels.cuda import CudaOperators
from workers.kernels.cuda_graphs import Eager, GraphRecorder, StepRecorder
from workers.kernels.flash import Flash2, FlashAttention, find_flash
from workers.models.families import read_config
from workers.models.torch_runner import TorchRunner

BLOCK_TOKENS = 256  # every version of flash-attn reads these
IS_REHEARSAL = os.environ.get("POINTSMAN_GPU_TESTS") == "cpu"
DEVICE = torch.device("cpu" if IS_REHEARSAL else "cuda")


def flash_here() -> FlashAttention:
    """The installed flash-attn; a stand-in in a rehearsal."""
    found = Flash2(StandIn(FLASH_2).module) if IS_REHEARSAL else find_flash()
    if found is None:
        pytest.fail("flash-attn is not installed")
    return found


def recorder_here() -> StepRecorder:
    """CUDA graphs; none in a rehearsal."""
    return Eager() if IS_REHEARSAL else GraphRecorder()


def engine_on(model: Path, recorder: StepRecorder | None = None) -> TorchRunner:
    """The CUDA engine of a model directory."""
    max_blocks = -(-read_config(model).context_tokens // BLOCK_TOKENS)
    operators = CudaOperators(flash_here(), DEVICE, recorder or recorder_here(), max_blocks)
    return TorchRunner(model, block_tokens=BLOCK_TOKENS, operators=operators)
