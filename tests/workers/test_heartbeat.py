"""What a beat brings back from the ledger, and to whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.ledger.drain_orders import DrainOrder
from pipeline.ledger.worker_ledger import BeatReply
from pipeline.protocol.request import Priority
from pipeline.scheduling.fleet import Role, WorkerState
from workers.heartbeat import Heartbeat

STATE = WorkerState(
    worker="w", node="n", role=Role.BOTH, model="m", namespace="", queues=(), capacity=1
)


class Ledger:
    """Answers one beat after another."""

    def __init__(self, *replies: BeatReply) -> None:
        self.replies = list(replies)

    def beat(self, worker: str, lease_s: float, state_json: str) -> BeatReply:
        assert (worker, lease_s) == ("w", 4.0)
        assert WorkerState.model_validate_json(state_json) == STATE
        return self.replies.pop(0)


def reply(waiting: Mapping[Priority, int], **more: Any) -> BeatReply:
    fields: dict[str, Any] = {"now_ms": 1, "cancelled": [], "drain": None, "num_owned": 0}
    return BeatReply(**(fields | more), waiting=dict(waiting))


def told_by(*replies: BeatReply) -> list[object]:
    told: list[object] = []
    ledger: Any = Ledger(*replies)
    heartbeat = Heartbeat(
        "w",
        ledger,
        4.0,
        lambda: STATE,
        before_beat=lambda: None,
        is_well=lambda: True,
        on_cancelled=told.append,
        on_drain=told.append,
        on_owned=lambda count: told.append(count) if count else None,
        on_waiting=told.append,
    )
    for _ in replies:
        heartbeat.beat()
    return told


def test_each_word_goes_to_whom_it_is_for() -> None:
    order = DrainOrder(5.0, comes_back=False)
    assert told_by(reply({}, cancelled=["r1", "r2"], drain=order, num_owned=3)) == [
        "r1",
        "r2",
        order,
        3,
    ]


def test_prompts_that_wait_are_told_with_each_beat_and_their_end_once() -> None:
    nobody, some = dict.fromkeys(Priority, 0), {Priority.NORMAL: 2}
    lines = (nobody, some, some, nobody, nobody, some)
    assert told_by(*map(reply, lines)) == [some, some, nobody, some]
