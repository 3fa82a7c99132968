"""The digest engine: output that depends on every KV byte, so that a wrong block cannot hide."""

from __future__ import annotations

import hashlib
import struct
import time

import numpy as np
import xxhash

from pipeline.script_book import BASE_VOCAB_SIZE, EOS_ID
from tiering.block_layout import BlockLayout
from workers.hbm_pool import ByteArray, HostPool
from workers.model import Float32Array, Int32Array, ModelSpec, StepBatch
from workers.models.errors import PoolNotBound

_ENTRY_BYTES = 32
_FIRST_PRINTABLE = 32
_NUM_PRINTABLE = 95
_LOGIT_SPREAD = 8.0
_TOKEN_AND_POSITION = struct.Struct("<qq")
_START_OF_CHAIN = bytes(_ENTRY_BYTES)

# Weyl increment and mixers of splitmix64 (Steele, Lea, Flood, 2014).
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class DigestRunner:
    """KV entries are a hash chain over the tokens; the next token is a hash over all entries read.

    An entry is 32 bytes: blake2b over the previous token's entry as it stands in the pool, the
    token id and the position. A block is its entries one after the other. Context is read through
    block tables only, never from the histories. Generates printable ASCII, never end-of-text.
    """

    def __init__(
        self, *, context_tokens: int = 512, block_tokens: int = 16, step_delay_ms: float = 0.0
    ) -> None:
        """Every `forward` takes at least `step_delay_ms`."""
        layout = BlockLayout(
            num_layers=1,
            block_tokens=block_tokens,
            num_kv_heads=1,
            head_dim=_ENTRY_BYTES // 2,
            dtype="uint8",
        )
        self._spec = ModelSpec(
            layout=layout,
            vocab_size=BASE_VOCAB_SIZE,
            context_tokens=context_tokens,
            eos_token_ids=frozenset({EOS_ID}),
            fingerprint=hashlib.sha256(b"pointsman digest engine 1").digest(),
        )
        self._step_delay_s = step_delay_ms / 1000
        self._blocks: ByteArray | None = None

    @property
    def spec(self) -> ModelSpec:
        """See the port."""
        return self._spec

    def make_pool(self, num_blocks: int) -> HostPool:
        """See the port."""
        pool = HostPool(num_blocks, self._spec.layout.block_bytes)
        self._blocks = pool.reach
        return pool

    def warm_up(self, max_tokens: int) -> None:
        """See the port; nothing to do."""

    def forward(self, batch: StepBatch) -> Float32Array:
        """See the port."""
        if self._step_delay_s:
            time.sleep(self._step_delay_s)
        if self._blocks is None:
            raise PoolNotBound
        self._write_entries(self._blocks, batch)
        return _logits(self._context_digests(self._blocks, batch), self._spec.vocab_size)

    def _write_entries(self, blocks: ByteArray, batch: StepBatch) -> None:
        block_tokens = self._spec.layout.block_tokens
        entries = blocks.reshape(-1, block_tokens, _ENTRY_BYTES, copy=False)
        previous = self._previous_entries(entries, batch)
        token_ids, positions = batch.token_ids.tolist(), batch.positions.tolist()
        bounds = batch.cu_query_lens.tolist()
        written: list[bytes] = []
        for row, entry in enumerate(previous):
            for index in range(bounds[row], bounds[row + 1]):
                data = entry + _TOKEN_AND_POSITION.pack(token_ids[index], positions[index])
                entry = hashlib.blake2b(data, digest_size=_ENTRY_BYTES).digest()  # noqa: PLW2901
                written.append(entry)
        fresh = np.frombuffer(b"".join(written), dtype=np.uint8).reshape(-1, _ENTRY_BYTES)
        entries[np.divmod(batch.slot_mapping, block_tokens)] = fresh

    def _previous_entries(self, entries: ByteArray, batch: StepBatch) -> list[bytes]:
        """Entry before the first token of each sequence's span, as the pool holds it."""
        block_tokens = self._spec.layout.block_tokens
        previous = batch.positions[batch.cu_query_lens[:-1]] - 1
        rows = np.arange(len(previous))
        blocks = batch.block_tables[rows, np.maximum(previous, 0) // block_tokens]
        data = entries[blocks, previous % block_tokens].tobytes()
        return [
            data[row * _ENTRY_BYTES : (row + 1) * _ENTRY_BYTES]
            if position >= 0
            else _START_OF_CHAIN
            for row, position in enumerate(previous.tolist())
        ]

    def _context_digests(self, blocks: ByteArray, batch: StepBatch) -> list[int]:
        """xxh3 over all entries up to and including each wanted row's token."""
        sequence_of_row = np.searchsorted(batch.cu_query_lens, batch.logit_rows, side="right") - 1
        lengths = batch.positions[batch.logit_rows] + 1
        digests: list[int] = []
        for row, num_tokens in zip(sequence_of_row.tolist(), lengths.tolist(), strict=True):
            context = _gather(blocks, batch.block_tables[row], num_tokens * _ENTRY_BYTES)
            digests.append(xxhash.xxh3_64_intdigest(context.data, seed=num_tokens))
        return digests


def _gather(blocks: ByteArray, block_table: Int32Array, num_bytes: int) -> ByteArray:
    num_blocks = -(-num_bytes // blocks.shape[1])
    return blocks[block_table[:num_blocks]].reshape(-1)[:num_bytes]


def _logits(digests: list[int], vocab_size: int) -> Float32Array:
    """Pseudo-random rows (R, vocab_size) in [0, 8), minus infinity outside printable ASCII."""
    rows = np.full((len(digests), vocab_size), -np.inf, dtype=np.float32)
    columns = np.arange(1, _NUM_PRINTABLE + 1, dtype=np.uint64) * _GOLDEN
    seeds = np.array(digests, dtype=np.uint64)
    bits = seeds[:, None] + columns
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    bits ^= bits >> np.uint64(31)
    unit = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)
    rows[:, _FIRST_PRINTABLE : _FIRST_PRINTABLE + _NUM_PRINTABLE] = unit * np.float32(_LOGIT_SPREAD)
    return rows
