"""What an operator reads on the screen of `pointsman status`."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pipeline.cli.status import Status, WorkerLine, as_screen
from pipeline.scheduling.fleet import Role, WorkerState


def shown(**fields: float) -> str:
    """The line of one worker with these fields in its heartbeat."""
    state = WorkerState(
        worker="w@n#1",
        node="n",
        role=Role.BOTH,
        model="m",
        namespace="s",
        queues=(),
        capacity=4,
        **fields,  # type: ignore[arg-type]
    )
    status = Status(
        now_ms=0,
        leader="",
        workers=[WorkerLine("w@n#1", state, age_s=0.0, lease_ms=4000, num_owned=0)],
        queues=[],
        num_open=0,
        num_held=0,
        num_dead_letters=0,
        counters={},
        nodes=[],
        faults=[],
    )
    console = Console(file=io.StringIO(), width=160)
    console.print(as_screen(status))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    (line,) = [line for line in text.splitlines() if line.strip().startswith("w@n")]
    return str(line)


@pytest.mark.parametrize(("measured", "cell"), [(0.0, "-"), (412.6, "413")])
def test_the_speed_of_prompts_is_what_was_measured_not_what_full_steps_might_come_to(
    measured: float, cell: str
) -> None:
    line = shown(prefill_tokens_per_s=18198.0, measured_prefill_tokens_per_s=measured)
    assert line.split()[-1] == cell
