"""How many lines are in flight, and who gets the next slot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.batch.conductor import MAX_ACTIVE, MAX_DRIVES, chosen
from pipeline.batch.records import BatchRecord
from pipeline.batch.slots import UNKNOWN_LINES, SlotBook, Slots, wanted_window
from pipeline.scheduling.fleet import Fleet, Role, WorkerState


def fleet(*workers: dict[str, Any]) -> Fleet:
    states = {
        f"w{rank}": WorkerState(
            worker=f"w{rank}",
            node="n",
            namespace="s",
            model="m",
            queues=(),
            **{"role": Role.BOTH, "capacity": 10, **fields},
        )
        for rank, fields in enumerate(workers)
    }
    return Fleet(states, dict.fromkeys(states, 0.0))


@pytest.mark.parametrize(
    ("workers", "num_own", "window"),
    [
        ([{}], 0, 20),
        ([{}, {"capacity": 4}], 0, 28),
        ([{"role": Role.PREFILL}, {"role": Role.DECODE}], 0, 20),
        ([{"num_running": 10}], 10, 20),
        ([{"num_running": 7}], 0, 6),
        ([{"num_running": 10, "num_waiting": 4}], 0, 1),
        ([{"is_draining": True}], 0, 0),
        ([], 0, 0),
        ([{"capacity": 1000}], 0, 50),
    ],
)
def test_twice_the_places_that_others_leave_are_filled(
    workers: list[dict[str, Any]], num_own: int, window: int
) -> None:
    assert wanted_window(fleet(*workers), num_own, 50) == window


async def test_slots_go_to_those_who_came_first_and_never_beyond_the_limit() -> None:
    slots = Slots()
    turns = [slots.ask() for _ in range(4)]
    assert not any(turn.done() for turn in turns)
    slots.set_limit(2)
    assert [turn.done() for turn in turns] == [True, True, False, False]
    slots.give_back()
    assert [turn.done() for turn in turns] == [True, True, True, False]
    slots.set_limit(1)
    slots.give_back()
    assert not turns[3].done()
    slots.give_back()
    assert turns[3].done()
    assert slots.num_taken == 1


async def test_a_turn_that_is_given_up_takes_no_slot() -> None:
    slots = Slots()
    slots.set_limit(1)
    first, second, third = (slots.ask() for _ in range(3))
    slots.withdraw(second)
    slots.withdraw(first)
    assert third.done()
    slots.withdraw(third)
    assert slots.num_taken == 0


def test_a_tenant_with_many_batches_does_not_keep_others_out() -> None:
    batches = [SimpleNamespace(number=n, tenant="big", model="m") for n in range(1, 30)]
    batches.append(SimpleNamespace(number=30, tenant="small", model="m"))
    records = cast("list[BatchRecord]", batches)
    first = [batch.number for batch in chosen(records, set())]
    assert len(first) == MAX_ACTIVE
    assert first[:3] == [1, 30, 2]
    assert [batch.number for batch in chosen(records, set(first[:-1]))] == [first[-1]]
    assert chosen(records, set(first)) == []


def test_batches_of_a_jammed_model_do_not_keep_those_of_another_out() -> None:
    batches = [SimpleNamespace(number=n, tenant="t", model="a") for n in range(1, 30)]
    batches.append(SimpleNamespace(number=30, tenant="t", model="b"))
    records = cast("list[BatchRecord]", batches)
    jammed = set(range(1, MAX_ACTIVE + 1))
    assert [batch.number for batch in chosen(records, jammed)] == [30]


def test_batches_of_made_up_models_start_in_bounded_number() -> None:
    batches = [SimpleNamespace(number=n, tenant="t", model=f"x{n}") for n in range(200)]
    assert len(chosen(cast("list[BatchRecord]", batches), set())) == MAX_DRIVES


async def test_a_model_without_slots_holds_no_line_of_another() -> None:
    book = SlotBook()
    book.of("b").set_limit(1)
    jammed, free = book.of("a").ask(), book.of("b").ask()
    assert (jammed.done(), free.done()) == (False, True)
    assert book.num_taken == 1
    assert book.slugs == ["b", "a"]


async def test_lines_of_an_unknown_model_run_a_few_at_a_time() -> None:
    book = SlotBook()
    turns = [book.of(None).ask() for _ in range(UNKNOWN_LINES + 1)]
    assert sum(turn.done() for turn in turns) == UNKNOWN_LINES
