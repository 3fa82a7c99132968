"""Which steps share a graph, on a stand-in for torch's graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from workers.kernels.cuda_graphs import GraphRecorder
from workers.kernels.operators import StepPlan


class StandInGraph:
    """Counts its replays in `replayed`; all graphs have one pool."""

    replayed: list[StandInGraph]

    def replay(self) -> None:
        self.replayed.append(self)

    def pool(self) -> str:
        return "pool"


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[StandInGraph]:
    """The graphs that ran, in order."""
    ran: list[StandInGraph] = []

    @contextmanager
    def capture(graph: StandInGraph, **options: Any) -> Iterator[None]:
        assert options["capture_error_mode"] == "thread_local"
        yield

    StandInGraph.replayed = ran
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandInGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return ran


def plan_of(num_rows: int) -> StepPlan:
    """A plan of so many decode rows."""
    rows = torch.zeros(num_rows, dtype=torch.int64)
    none = torch.zeros((0, 3), dtype=torch.int32)
    return StepPlan(rows, rows, none, none, none, torch.zeros(1))


def test_a_graph_serves_one_name_one_number_of_rows_and_one_memory(
    replayed: list[StandInGraph],
) -> None:
    recorder, small, large = GraphRecorder(), plan_of(1), plan_of(2)
    bodies: list[str] = []

    def step(memory: int, name: str, plan: StepPlan) -> None:
        recorder.replay(memory, name, plan, lambda: bodies.append(name))

    for name, plan in (("all", small), ("all", large), ("early", small)):
        step(1, name, plan)
    assert bodies == ["all", "all", "all", "all", "early", "early"]  # run, then recorded

    for name, plan in (("early", small), ("all", small), ("all", large), ("early", small)):
        step(1, name, plan)
    assert len(bodies) == 6
    assert replayed[0] is replayed[3]
    assert len({id(graph) for graph in replayed}) == 3

    step(2, "all", small)
    assert len(bodies) == 8
    step(1, "all", small)
    assert len(bodies) == 10
    assert len(replayed) == 4
