"""The torch engine: a real model behind the model port, on the CPU or a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np
import structlog
import torch

from tiering.block_layout import BlockLayout, KvDtype
from workers.hbm_pool import HbmPool, HostPool
from workers.kernels.decode_buckets import BUCKETS
from workers.kernels.device_pool import DevicePool
from workers.kernels.operators import Operators, PagedAttention, StepPlan
from workers.kernels.step_plan import plan_step
from workers.model import DeviceMemory, Float32Array, ModelSpec, StepBatch
from workers.models.errors import ModelRefused, PoolNotBound, TokenNotKnown
from workers.models.families import read_config
from workers.models.model_facts import ModelFacts
from workers.models.operator_choice import choose_operators
from workers.models.transformer import Decoder
from workers.models.weights import fingerprint

log = structlog.get_logger(__name__)

_KV_DTYPES: dict[torch.dtype, KvDtype] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class _PagedModel(Protocol):
    """What `Decoder` and `ModulesDecoder` have in common; see there."""

    def rope(self, num_positions: int) -> torch.Tensor: ...
    def reserve(self, num_rows: int) -> None: ...
    def bind(self, pool: torch.Tensor) -> list[PagedAttention]: ...
    def forward(
        self,
        token_ids: torch.Tensor,
        logit_rows: torch.Tensor,
        attentions: list[PagedAttention],
        plan: StepPlan,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class _Opened:
    """A model in memory. `suffix` tells its KV from that of the same model computed otherwise."""

    decoder: _PagedModel
    facts: ModelFacts
    operators: Operators
    suffix: str = ""


def _open(
    model: Path, block_tokens: int, dtype: str, device: str, operators: Operators | None
) -> _Opened:
    """With the compact decoder, or over transformers' modules what that does not cover."""
    try:
        config = read_config(model)
    except ModelRefused as refusal:
        log.warning("compact_decoder_not_used", model=model.name, reason=refusal.reason)
        return _open_modules(model, block_tokens, dtype, device, operators)
    own = operators or choose_operators(config.facts, block_tokens, dtype, device)
    return _Opened(Decoder(model, config, own), config.facts, own)


def _open_modules(
    model: Path, block_tokens: int, dtype: str, device: str, operators: Operators | None
) -> _Opened:
    from workers.models.modules import ModulesDecoder, ModulesModel  # noqa: PLC0415  # seconds

    if dtype == "int8":
        raise ModelRefused(model.name, "int8 is for the compact decoder alone")
    # Without our own products no batch has the bytes of another in bfloat16: "auto" avoids it.
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    number_type = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    place = torch.device(device)
    if operators is not None:
        number_type, place = operators.dtype, operators.device
    opened = ModulesModel(model, number_type, place)
    own = operators or choose_operators(opened.facts, block_tokens, dtype, device)
    suffix = f" modules {version('transformers')}"
    return _Opened(ModulesDecoder(opened, own), opened.facts, own, suffix)


def _memory_of(device: torch.device) -> DeviceMemory | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, torch.cuda.memory_reserved(device), free)


class TorchRunner:
    """Runs a Hugging Face directory of a decoder-only model. Threads are the process's own setting."""

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

        `dtype` is "float32", "bfloat16", "int8" or "auto", `device` "cpu" or "cuda" (see
        `choose_operators`); `operators`, where given, decide instead.

        Raises:
            ModelFilesMissing: the directory lacks a file or a weight.
            ModelRefused: the model cannot be run exactly, or not in this type.
        """
        opened = _open(model, block_tokens, dtype, device, operators)
        facts, own_operators = opened.facts, opened.operators
        kv_dtype = _KV_DTYPES[own_operators.dtype]
        self._spec = ModelSpec(
            layout=BlockLayout(
                num_layers=facts.num_layers,
                block_tokens=block_tokens,
                num_kv_heads=facts.num_kv_heads,
                head_dim=facts.head_dim,
                dtype=kv_dtype,
            ),
            vocab_size=facts.vocab_size,
            context_tokens=facts.context_tokens,
            eos_token_ids=facts.eos_token_ids,
            # Another form rounds otherwise: its blocks are good, but not the same bytes.
            fingerprint=fingerprint(model, f"{kv_dtype} {own_operators.name}{opened.suffix}"),
            memory=_memory_of(own_operators.device),
        )
        self.operators = own_operators
        self._dtype = own_operators.dtype
        self._decoder = opened.decoder
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
            memory = torch.from_numpy(pool.reach)
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
