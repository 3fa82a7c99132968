"""Recording a decode step once per bucket as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from workers.kernels.operators import StepPlan


class StepRecorder(Protocol):
    """Runs the body of a step whose plan and rows are the same memory each time they are given."""

    def replay(self, memory: Hashable, name: str, plan: StepPlan, body: Callable[[], None]) -> None:
        """Do what `body` does; see `Operators.replay`."""
        ...


class Eager:
    """Records nothing."""

    def replay(self, memory: Hashable, name: str, plan: StepPlan, body: Callable[[], None]) -> None:
        """See the port."""
        body()


class GraphRecorder:
    """One graph per body and number of rows.

    All share one pool of device memory, for only one runs at a time.
    """

    def __init__(self) -> None:
        self._memory: Hashable = None
        self._graphs: dict[tuple[str, int, int], Any] = {}
        self._graph_pool: Any = None

    def replay(self, memory: Hashable, name: str, plan: StepPlan, body: Callable[[], None]) -> None:
        """See the port. The first run of a number of rows is not recorded, but recorded after."""
        if memory != self._memory:
            self._memory = memory
            self._graphs.clear()  # they name memory that is gone
        own = (name, len(plan.positions), plan.positions.data_ptr())
        graph = self._graphs.get(own)
        if graph is not None:
            graph.replay()
            return
        body()  # libraries make their workspaces here; its results stand, for a record runs nothing
        self._graphs[own] = self._record(body)

    def _record(self, body: Callable[[], None]) -> Any:
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls count: the copies of tier moves go on meanwhile.
        with torch.cuda.graph(graph, pool=self._graph_pool, capture_error_mode="thread_local"):
            body()
        self._graph_pool = graph.pool()
        return graph
