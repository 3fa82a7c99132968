"""KV goes from one engine's device memory to another's through the host, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.gpu.machine import engine_on
from workers.models.bench import EngineBench

pytestmark = pytest.mark.gpu

PROMPT = np.random.default_rng(5).integers(3, 300, 500).tolist()
MakeModel = Callable[[str], Path]


def test_a_sequence_goes_on_from_blocks_that_were_moved(tiny_model: MakeModel) -> None:
    source = EngineBench(engine_on(tiny_model("llama")), num_blocks=8, seed=1)
    first = source.lane(PROMPT, 8)
    source.catch_up(first)
    moved = [data.copy() for data in source.hbm.read(first.block_ids)]
    target = EngineBench(engine_on(tiny_model("llama")), num_blocks=8, seed=2)
    second = target.lane(PROMPT, 8)
    for block_id, data in zip(second.block_ids, moved, strict=True):
        target.hbm.begin_write(block_id)[:] = data
        target.hbm.finish_write(block_id)
    target.hbm.settle()
    second.tokens.append(first.tokens[-1])
    second.num_computed = len(PROMPT)

    here, there = source.catch_up(first), target.catch_up(second)

    assert [data.tobytes() for data in target.hbm.read(second.block_ids[:1])] == [
        moved[0].tobytes()
    ]
    np.testing.assert_array_equal(here, there)


def test_blocks_move_while_steps_run_on_others(tiny_model: MakeModel) -> None:
    bench = EngineBench(engine_on(tiny_model("llama")), num_blocks=40, seed=3)
    lane = bench.lane(PROMPT, 8)
    alone = bench.catch_up(lane).copy()
    others = [block_id for block_id in range(40) if block_id not in lane.block_ids]
    content = np.random.default_rng(0).integers(0, 256, (len(others), bench.hbm.block_bytes))
    rows = content.astype(np.uint8)

    for round_number in range(4):
        for block_id, row in zip(others, np.roll(rows, round_number, axis=0), strict=True):
            bench.hbm.begin_write(block_id)[:] = row
            bench.hbm.finish_write(block_id)
        lane.num_computed, lane.tokens = 0, lane.tokens[: len(PROMPT)]
        again = bench.catch_up(lane).copy()
        bench.hbm.settle()
        np.testing.assert_array_equal(again, alone)

    for row, data in zip(np.roll(rows, 3, axis=0), bench.hbm.read(others), strict=True):
        assert np.array_equal(row, data)
