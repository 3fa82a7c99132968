"""The torch engine: a real model behind the model port, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from tiering.block_layout import BlockLayout
from workers.model import ByteArray, Float32Array, ModelSpec, StepBatch
from workers.models.attention import TORCH_DTYPES, PagedKv
from workers.models.errors import ModelRefused, PoolMismatch, PoolNotBound
from workers.models.families import read_config
from workers.models.transformer import Decoder
from workers.models.weights import fingerprint

EngineDtype = Literal["float32", "bfloat16"]


class TorchRunner:
    """Runs a Hugging Face directory of a known family. Threads are the process's own setting."""

    def __init__(self, model: Path, *, block_tokens: int = 16, dtype: str = "float32") -> None:
        """Read the model into memory.

        Raises:
            ModelFilesMissing: the directory lacks a file or a weight.
            ModelRefused: the model cannot be run exactly, or not in this type.
        """
        config = read_config(model)
        if dtype == "float32":
            kv_dtype: EngineDtype = "float32"
        elif dtype == "bfloat16":
            kv_dtype = "bfloat16"
        else:
            raise ModelRefused(
                config.name, f"dtype {dtype} is not one of {', '.join(get_args(EngineDtype))}"
            )
        self._spec = ModelSpec(
            layout=BlockLayout(
                num_layers=config.num_layers,
                block_tokens=block_tokens,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=kv_dtype,
            ),
            vocab_size=config.vocab_size,
            context_tokens=config.context_tokens,
            eos_token_ids=config.eos_token_ids,
            fingerprint=fingerprint(model, dtype),
        )
        self._decoder = Decoder(model, config, TORCH_DTYPES[dtype])
        self._kv: PagedKv | None = None

    @property
    def spec(self) -> ModelSpec:
        """See the port."""
        return self._spec

    def bind_pool(self, pool: ByteArray) -> None:
        """See the port.

        Raises:
            PoolMismatch: the pool is not made of this model's blocks.
        """
        block_bytes = self._spec.layout.block_bytes
        if pool.shape[1] != block_bytes:
            raise PoolMismatch(pool.shape[1], block_bytes)
        self._kv = PagedKv(pool, self._spec.layout)

    def warm_up(self) -> None:
        """See the port. Writes into block 0, which holds nothing yet."""
        num_tokens = self._spec.layout.block_tokens
        for start, end in ((0, num_tokens - 1), (num_tokens - 1, num_tokens)):
            if start < end:
                self.forward(_first_block(start, end))

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Float32Array:
        """See the port."""
        if self._kv is None:
            raise PoolNotBound
        logits = self._decoder.forward(
            torch.from_numpy(batch.token_ids),
            torch.from_numpy(batch.positions),
            torch.from_numpy(batch.logit_rows),
            self._kv,
            self._kv.plan(batch),
        )
        result: Float32Array = logits.numpy()
        return result


def _first_block(start: int, end: int) -> StepBatch:
    """A step over positions [start, end) of one sequence in block 0."""
    positions = np.arange(start, end, dtype=np.int64)
    return StepBatch(
        token_ids=np.zeros(end - start, dtype=np.int64),
        positions=positions,
        slot_mapping=positions,
        cu_query_lens=np.array([0, end - start], dtype=np.int32),
        context_lens=np.array([end], dtype=np.int32),
        block_tables=np.zeros((1, 1), dtype=np.int32),
        logit_rows=np.array([end - start - 1], dtype=np.int64),
        histories=[[0] * end],
        num_prompt_tokens=[end],
    )
