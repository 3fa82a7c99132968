"""The script engine: says what its book lists, whatever the prompt holds."""

from __future__ import annotations

import hashlib
import math
import time

import numpy as np

from pipeline.script_book import EOS_ID, Script, ScriptBook
from tiering.block_layout import BlockLayout
from workers.hbm_pool import HostPool
from workers.model import Float32Array, ModelSpec, StepBatch

_FLOOR = -9999.0  # exp() of it is zero, yet it stays a finite number in a JSON answer


class ScriptRunner:
    """Emits the pieces of the script that the prompt names as `[[name]]`, one token per piece.

    The token is chosen by the number of tokens after the prompt, so a recovered or handed-over
    sequence goes on where it was. KV blocks are two bytes a token and stay as they are.
    """

    def __init__(self, book: ScriptBook, *, block_tokens: int = 16) -> None:
        """Blocks hold `block_tokens` tokens."""
        self._book = book
        self._spec = ModelSpec(
            layout=BlockLayout(
                num_layers=1, block_tokens=block_tokens, num_kv_heads=1, head_dim=1, dtype="uint8"
            ),
            vocab_size=book.vocab_size,
            context_tokens=book.context_tokens,
            eos_token_ids=frozenset({EOS_ID}),
            fingerprint=hashlib.sha256(
                b"pointsman script engine 1" + book.model_dump_json().encode()
            ).digest(),
        )
        self._token_ids = {name: book.token_ids(name) for name in book.scripts}

    @property
    def spec(self) -> ModelSpec:
        """See the port."""
        return self._spec

    def make_pool(self, num_blocks: int) -> HostPool:
        """See the port."""
        return HostPool(num_blocks, self._spec.layout.block_bytes)

    def warm_up(self, max_tokens: int) -> None:
        """See the port; nothing to do."""

    def forward(self, batch: StepBatch) -> Float32Array:
        """See the port. Sleeps once, for the longest delay of the batch."""
        names = [self._script_name(batch, row) for row in range(len(batch.context_lens))]
        delay_ms = max(
            (self._delay_ms(batch, row, name) for row, name in enumerate(names)), default=0
        )
        if delay_ms:
            time.sleep(delay_ms / 1000)
        sequence_of_row = np.searchsorted(batch.cu_query_lens, batch.logit_rows, side="right") - 1
        logits = np.empty((len(batch.logit_rows), self._spec.vocab_size), dtype=np.float32)
        for out, row, index in zip(logits, sequence_of_row.tolist(), batch.logit_rows, strict=True):
            num_said = int(batch.positions[index]) + 1 - batch.num_prompt_tokens[row]
            script = self._book.scripts[names[row]]
            out.fill(_other_logit(script.logprob, self._spec.vocab_size))
            out[self._token_id(names[row], script, num_said)] = script.logprob
        return logits

    def _script_name(self, batch: StepBatch, row: int) -> str:
        prompt = batch.histories[row][: batch.num_prompt_tokens[row]]
        vocabulary = self._book.vocabulary
        return self._book.script_name(b"".join([vocabulary[token] for token in prompt]))

    def _delay_ms(self, batch: StepBatch, row: int, name: str) -> float:
        script = self._book.scripts[name]
        first_position = int(batch.positions[batch.cu_query_lens[row]])
        is_prefill = first_position < batch.num_prompt_tokens[row]
        return script.prefill_delay_ms if is_prefill else script.token_delay_ms

    def _token_id(self, name: str, script: Script, num_said: int) -> int:
        token_ids = self._token_ids[name]
        number = max(num_said, 0)
        if number < len(token_ids):
            return token_ids[number]
        return EOS_ID if script.ends else token_ids[-1]


def _other_logit(logprob: float, vocab_size: int) -> float:
    """Logit of every other token, so that all probabilities add up to one."""
    rest = -math.expm1(logprob)
    return math.log(rest / (vocab_size - 1)) if rest > 0 else _FLOOR
