"""Choosing the form of the operators that a model runs on."""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

import structlog
import torch

from workers.kernels.cuda import CudaOperators
from workers.kernels.cuda_graphs import GraphRecorder
from workers.kernels.flash import find_flash, why_not_flash
from workers.kernels.native import NativeOperators, why_not_native
from workers.kernels.native_build import NativeKernelsMissing
from workers.kernels.operators import Operators
from workers.kernels.reference import ReferenceOperators
from workers.models.errors import ModelRefused
from workers.models.model_facts import ModelFacts

log = structlog.get_logger(__name__)

EngineDtype = Literal["auto", "float32", "bfloat16", "int8"]


def choose_operators(
    facts: ModelFacts, block_tokens: int, dtype: str, device: str = "cpu"
) -> Operators:
    """The fastest form that computes in `dtype` on `device` ("cpu" or "cuda").

    "auto" is bfloat16 where the native form runs, else float32: without it bfloat16 is slower and
    no batch gives the same bytes as another. On a GPU it is bfloat16. "int8" is bfloat16 with
    products in int8, which the native form alone knows.

    Raises:
        ModelRefused: `dtype` is no type of the torch engine or of the device, or the device's
            libraries are missing or cannot run this model.
    """
    if dtype not in get_args(EngineDtype):
        raise ModelRefused(
            facts.name, f"dtype {dtype} is not one of {', '.join(get_args(EngineDtype))}"
        )
    if device == "cuda":
        return _cuda_operators(facts, block_tokens, dtype)
    if dtype == "float32":
        return ReferenceOperators(torch.float32)
    reason = why_not_native(facts.head_dim, block_tokens, facts.product_widths) or why_not_here()
    if reason is None:
        return NativeOperators(int8_weights=dtype == "int8")
    if dtype == "int8":
        raise ModelRefused(facts.name, f"int8 needs the native kernels: {reason}")
    log.warning("native_kernels_not_used", model=facts.name, reason=reason)
    return ReferenceOperators(torch.bfloat16 if dtype == "bfloat16" else torch.float32)


def _cuda_operators(facts: ModelFacts, block_tokens: int, dtype: str) -> Operators:
    if dtype in ("float32", "int8"):
        raise ModelRefused(facts.name, "on a GPU it runs in bfloat16 only")
    flash = find_flash()
    if flash is None:
        raise ModelRefused(
            facts.name, 'a GPU needs flash-attn: pip install --no-build-isolation ".[gpu]"'
        )
    reason = why_not_flash(flash, facts.head_dim, block_tokens)
    if reason is not None:
        raise ModelRefused(facts.name, reason)
    max_blocks = -(-facts.context_tokens // block_tokens)
    return CudaOperators(flash, torch.device("cuda"), GraphRecorder(), max_blocks)


@cache
def why_not_here() -> str | None:
    """The reason why this machine cannot run the native form; None if it can. May build it."""
    try:
        NativeOperators()
    except NativeKernelsMissing as error:
        return error.reason
    return None
