"""From the engine to the traced task body: what became of a task in this process."""

from __future__ import annotations

import threading
from typing import Literal, TypedDict


class TaskResult(TypedDict):
    """What Flower shows as a task's result. Counts and codes, never text."""

    outcome: Literal["finished", "handed_over", "failed", "superseded", "ignored"]
    ending: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


_results: dict[str, TaskResult] = {}
_lock = threading.Lock()


def put_result(task_id: str, result: TaskResult) -> None:
    """Leave a result for the task body that runs next."""
    with _lock:
        _results[task_id] = result


def take_result(task_id: str) -> TaskResult | None:
    """Take it, once; None if the engine knows nothing of this task."""
    with _lock:
        return _results.pop(task_id, None)
