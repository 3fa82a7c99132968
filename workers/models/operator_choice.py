"""Choosing the form of the operators that a model runs on."""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

import structlog
import torch

from workers.kernels.native import NativeOperators, why_not_native
from workers.kernels.native_build import NativeKernelsMissing
from workers.kernels.operators import Operators
from workers.kernels.reference import ReferenceOperators
from workers.models.errors import ModelRefused
from workers.models.families import DecoderConfig

log = structlog.get_logger(__name__)

EngineDtype = Literal["auto", "float32", "bfloat16"]


def choose_operators(config: DecoderConfig, block_tokens: int, dtype: str) -> Operators:
    """The fastest form that computes in `dtype`.

    "auto" is bfloat16 where the native form runs, else float32: without it bfloat16 is slower and
    no batch gives the same bytes as another.

    Raises:
        ModelRefused: `dtype` is no type of the torch engine.
    """
    if dtype not in get_args(EngineDtype):
        raise ModelRefused(
            config.name, f"dtype {dtype} is not one of {', '.join(get_args(EngineDtype))}"
        )
    if dtype == "float32":
        return ReferenceOperators(torch.float32)
    query_width = config.num_heads * config.head_dim
    widths = (config.hidden_size, config.intermediate_size, query_width)
    reason = why_not_native(config.head_dim, block_tokens, widths) or why_not_here()
    if reason is None:
        return NativeOperators()
    log.warning("native_kernels_not_used", model=config.name, reason=reason)
    return ReferenceOperators(torch.bfloat16 if dtype == "bfloat16" else torch.float32)


@cache
def why_not_here() -> str | None:
    """The reason why this machine cannot run the native form; None if it can. May build it."""
    try:
        NativeOperators()
    except NativeKernelsMissing as error:
        return error.reason
    return None
