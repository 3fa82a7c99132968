"""What tests of engines over a cache daemon have in common."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from pipeline.protocol.failure import Ending, FinishReason
from workers.sequence import Sequence

BLOCK = 16
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 100, 301]
MakeSequence = Callable[..., Sequence]
MakePrompt = Callable[[random.Random, int], list[int]]

LENGTH = Ending(reason=FinishReason.LENGTH)


def handed_over(
    sequence: MakeSequence, done: Sequence, max_tokens: int = 16, **fields: Any
) -> Sequence:
    """What a decode worker makes of a sequence that a prefill worker handed over."""
    prompt, logged = done.tokens[: done.num_prompt_tokens], done.tokens[done.num_prompt_tokens :]
    return sequence(
        done.request_id,
        prompt,
        max_tokens,
        logged=logged,
        attempt=done.attempt + 1,
        tail_key=done.tail_key,
        **fields,
    )


def prefill(engine: Any, *sequences: Sequence) -> None:
    """Compute their prompts, to the last block that is stored."""
    for each in sequences:
        engine.engine.submit(each)
    engine.sink.wait(lambda: all(each in engine.sink.prefilled for each in sequences))


def wait_kvd_at_rest(kvd: Any) -> None:
    """Nobody holds anything of the daemon's."""
    client = kvd.client("observer")
    client.connect()
    stats = client.stats()
    client.close()
    assert (stats.num_leases, stats.num_reservations) == (0, 0)
