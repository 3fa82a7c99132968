"""What stands in for flash-attn on a machine without a GPU.

Its functions take what the recorded signatures (flash_signatures.json) take, refuse what the
library's own checks refuse (types, shapes, strides, block sizes), and compute the rest densely.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

SIGNATURES: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("flash_signatures.json").read_text()
)
FLASH_2, FLASH_3 = SIGNATURES


class StandIn:
    """A module of the library; `calls` holds what its functions were given, by parameter name."""

    def __init__(self, version: str) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._version = version
        self.module = SimpleNamespace(
            **{name: self._function(name) for name in SIGNATURES[version]}
        )

    def _function(self, name: str) -> Callable[..., torch.Tensor]:
        signature = signature_of(self._version, name)

        def call(*positional: Any, **named: Any) -> torch.Tensor:
            bound = signature.bind(*positional, **named)  # TypeError, as the library's own
            self.calls.append((name, dict(bound.arguments)))
            bound.apply_defaults()
            given = bound.arguments
            if name == "flash_attn_varlen_func":
                return varlen(given)
            return with_cache(given, 256 if self._version == FLASH_2 else 1)

        return call


def signature_of(version: str, name: str) -> inspect.Signature:
    """The recorded signature."""
    names: dict[str, Any] = {}
    exec(f"def function({SIGNATURES[version][name]}): ...", names)  # noqa: S102  # our own file
    return inspect.signature(names["function"])


def require(condition: object, words: str) -> None:
    """Refuse as the library does."""
    if not condition:
        raise RuntimeError(words)


def check_pool(queries: torch.Tensor, given: dict[str, Any], names: str, multiple: int) -> None:
    """The checks of both versions."""
    keys, values, tables = (given[name] for name in names.split())
    for tensor in (queries, keys, values):
        require(tensor.dtype is torch.bfloat16, "only bfloat16 is used here")
        require(tensor.stride(-1) == 1, "the last dimension must be contiguous")
    require(keys.dim() == 4 and keys.shape == values.shape, "pools have four dimensions")
    require(keys.shape[1] % multiple == 0, f"block size must be divisible by {multiple}")
    require(queries.shape[-2] % keys.shape[2] == 0, "heads must be a multiple of kv heads")
    require(queries.shape[-1] == keys.shape[3], "heads have one size")
    require(tables.dtype is torch.int32 and tables.stride(-1) == 1, "tables are int32")
    require(given["causal"], "everything here is causal")


def varlen(given: dict[str, Any]) -> torch.Tensor:
    """Packed spans, version 2."""
    queries, bounds, contexts = given["q"], given["cu_seqlens_q"], given["cu_seqlens_k"]
    check_pool(queries, given, "k v block_table", 256)
    require(bounds.dtype is torch.int32 and contexts.dtype is torch.int32, "sums are int32")
    counts, lens = bounds.diff().tolist(), contexts.diff().tolist()
    require(len(counts) > 0, "batch size must be positive")
    require(len(given["block_table"]) == len(counts), "a table for each span")
    require(int(bounds[-1]) == len(queries), "the sums cover the rows")
    require(given["max_seqlen_q"] >= max(counts), "max_seqlen_q is too small")
    require(given["max_seqlen_k"] >= max(lens), "max_seqlen_k is too small")
    return attend_spans(queries, given["k"], given["v"], given, (counts, lens, "block_table"))


def with_cache(given: dict[str, Any], multiple: int) -> torch.Tensor:
    """One row per sequence, or packed spans (version 3)."""
    table = "block_table" if multiple > 1 else "page_table"
    queries, lens = given["q"], given["cache_seqlens"]
    check_pool(queries, given, f"k_cache v_cache {table}", multiple)
    require(lens.dtype is torch.int32, "lengths are int32")
    require(len(given[table]) == len(lens) > 0, "a table for each span")
    bounds = given.get("cu_seqlens_q")
    if bounds is None:
        require(queries.dim() == 4 and len(queries) == len(lens), "(batch, rows, heads, dim)")
        counts = [queries.shape[1]] * len(queries)
    else:
        require(bounds.dtype is torch.int32, "sums are int32")
        counts = bounds.diff().tolist()
        require(given["max_seqlen_q"] >= max(counts), "max_seqlen_q is too small")
    rows = queries.flatten(0, 1) if bounds is None else queries
    spans = (counts, lens.tolist(), table)
    return attend_spans(rows, given["k_cache"], given["v_cache"], given, spans).view_as(queries)


def attend_spans(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    given: dict[str, Any],
    spans: tuple[list[int], list[int], str],
) -> torch.Tensor:
    """Dense attention, span by span; causality and window are aligned to the last row."""
    out, start, group = torch.empty_like(queries), 0, queries.shape[1] // keys.shape[2]
    before, after = given["window_size"]
    for number, (count, length) in enumerate(zip(spans[0], spans[1], strict=True)):
        blocks = given[spans[2]][number].long()
        context_keys, context_values = (
            pool[blocks].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
            for pool in (keys, values)
        )
        own = queries[start : start + count].float()
        scores = torch.einsum("qhd,khd->hqk", own, context_keys) * given["softmax_scale"]
        distance = torch.arange(length) - torch.arange(length - count, length)[:, None]
        hidden = distance > (0 if after < 0 else min(after, 0))
        if before >= 0:
            hidden |= distance < -before
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, context_values)
        out[start : start + count] = attended.to(queries.dtype)
        start += count
    return out
