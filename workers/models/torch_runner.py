"""The torch engine: a real model behind the model port, on the CPU or a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tiering.block_layout import BlockLayout, KvDtype
from workers.hbm_pool import HbmPool, HostPool
from workers.kernels.decode_buckets import BUCKETS
from workers.kernels.device_pool import DevicePool
from workers.kernels.operators import Operators, PagedAttention
from workers.kernels.step_plan import plan_step
from workers.model import Float32Array, ModelSpec, StepBatch
from workers.models.errors import PoolNotBound, TokenNotKnown
from workers.models.families import read_config
from workers.models.operator_choice import choose_operators
from workers.models.transformer import Decoder
from workers.models.weights import fingerprint

_KV_DTYPES: dict[torch.dtype, KvDtype] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class TorchRunner:
    """Runs a Hugging Face directory of a known family. Threads are the process's own setting."""

    def __init__(
        self,
        model: Path,
        *,
        block_tokens: int = 16,
        dtype: str = "float32",
        device: str = "cpu",
        operators: Operators | None = None,
    ) -> None:
        """Read the model into memory.

        `dtype` is "float32", "bfloat16" or "auto", `device` "cpu" or "cuda" (see
        `choose_operators`); `operators`, where given, decide instead.

        Raises:
            ModelFilesMissing: the directory lacks a file or a weight.
            ModelRefused: the model cannot be run exactly, or not in this type.
        """
        config = read_config(model)
        if operators is None:
            operators = choose_operators(config, block_tokens, dtype, device)
        kv_dtype = _KV_DTYPES[operators.dtype]
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
            # Another form rounds otherwise: its blocks are good, but not the same bytes.
            fingerprint=fingerprint(model, f"{kv_dtype} {operators.name}"),
        )
        self.operators = operators
        self._dtype = operators.dtype
        self._decoder = Decoder(model, config, operators)
        self._attentions: list[PagedAttention] | None = None
        self._host_logits = torch.empty(0)

    @property
    def spec(self) -> ModelSpec:
        """See the port."""
        return self._spec

    def make_pool(self, num_blocks: int) -> HbmPool:
        """See the port."""
        layout, operators = self._spec.layout, self.operators
        pool: HostPool | DevicePool
        if operators.device.type == "cpu" and not operators.num_spare_blocks:
            pool = HostPool(num_blocks, layout.block_bytes)
            memory = torch.from_numpy(pool.blocks)
        else:
            spare = operators.num_spare_blocks
            pool = DevicePool(num_blocks, layout.block_bytes, operators.device, spare)
            memory = pool.tensor
        shape = (layout.num_layers, 2, layout.block_tokens, layout.num_kv_heads, layout.head_dim)
        self._attentions = self._decoder.bind(memory.view(self._dtype).view(len(memory), *shape))
        return pool

    def warm_up(self, max_tokens: int) -> None:
        """See the port. Writes into block 0, which holds nothing yet."""
        is_cpu = self.operators.device.type == "cpu"
        self._decoder.reserve(max_tokens if is_cpu else max(max_tokens, BUCKETS[-1]))
        if not is_cpu:  # graphs name the table: it must not move
            self._decoder.rope(self._spec.context_tokens)
            for bucket in reversed(BUCKETS):
                self.forward(_decode_rows(bucket))
        num_tokens = self._spec.layout.block_tokens
        for start, end in ((0, num_tokens - 1), (num_tokens - 1, num_tokens)):
            if start < end:
                self.forward(_first_block(start, end, num_prompt_tokens=num_tokens - 1))

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> Float32Array:
        """See the port. The logits lie in a buffer that the next step writes again.

        Raises:
            PoolNotBound: there is no pool yet.
            TokenNotKnown: a token id lies outside the vocabulary.
        """
        if self._attentions is None:
            raise PoolNotBound
        highest, vocab_size = int(batch.token_ids.max()), self._spec.vocab_size
        if (
            highest >= vocab_size or batch.token_ids.min() < 0
        ):  # native code would read past a table
            raise TokenNotKnown(highest, vocab_size)
        rope = self._decoder.rope(int(batch.positions.max()) + 1)
        logits = self._decoder.forward(
            torch.from_numpy(batch.token_ids),
            torch.from_numpy(batch.logit_rows),
            self._attentions,
            self.operators.stage(plan_step(batch, rope)),
        )
        result: Float32Array = self._on_host(logits).numpy()
        return result

    def _on_host(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits in host memory; with them, all of the step is done."""
        if logits.device.type == "cpu":
            return logits
        if len(self._host_logits) < len(logits):
            self._host_logits = torch.empty(logits.shape, pin_memory=True)
        here = self._host_logits[: len(logits)]
        here.copy_(logits, non_blocking=True)
        torch.cuda.current_stream(logits.device).synchronize()
        return here


def _decode_rows(num_rows: int) -> StepBatch:
    """A step of decode rows alone: as many sequences of one token, all in block 0."""
    zeros = np.zeros(num_rows, dtype=np.int64)
    return StepBatch(
        token_ids=zeros,
        positions=zeros,
        slot_mapping=zeros,
        cu_query_lens=np.arange(num_rows + 1, dtype=np.int32),
        context_lens=np.ones(num_rows, dtype=np.int32),
        block_tables=np.zeros((num_rows, 1), dtype=np.int32),
        logit_rows=np.arange(num_rows, dtype=np.int64),
        histories=[[0]] * num_rows,
        num_prompt_tokens=[0] * num_rows,
    )


def _first_block(start: int, end: int, num_prompt_tokens: int) -> StepBatch:
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
        num_prompt_tokens=[num_prompt_tokens],
    )
