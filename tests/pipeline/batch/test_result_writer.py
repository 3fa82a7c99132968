"""Results reach the database, whatever it says in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pipeline.batch import result_writer
from pipeline.batch.line_store import LineResult
from pipeline.batch.refusals import DatabaseAway
from pipeline.batch.result_writer import ResultWriter


@pytest.mark.parametrize("fault", [DatabaseAway(), ArithmeticError("a fault of ours")])
async def test_a_result_that_could_not_be_written_is_written_later(
    shelf: Any,
    make_input_line: Callable[..., bytes],
    monkeypatch: pytest.MonkeyPatch,
    fault: Exception,
) -> None:
    batch = shelf.accepted(make_input_line("a", model="m", prompt="hello") + b"\n")
    add, faults = shelf.lines.add_results, [fault, fault]

    def add_in_the_end(results: Sequence[LineResult]) -> int:
        if faults:
            raise faults.pop()
        return int(add(results))

    monkeypatch.setattr(shelf.lines, "add_results", add_in_the_end)
    monkeypatch.setattr(result_writer, "RETRY_S", 0.01)
    with ThreadPoolExecutor(1) as threads:
        writer = ResultWriter(shelf.lines, threads)
        writing = asyncio.create_task(writer.run())
        async with asyncio.timeout(10):
            await writer.add(LineResult(batch.number, 1, is_success=True, output=b"{}"))
        writing.cancel()
        await asyncio.wait({writing})
    assert [line.output for line in shelf.lines.ended(batch.number)] == [b"{}"]
